"""Several nodes: two launchers on one machine that share nothing but a store, and the SLURM script that starts them."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flows.cli import main
from forge_core.config import ConfigError
from forge_core.models.weights import read_tensors
from forge_core.training.launch import ADDRESS, ENDPOINT, NODES, RankOptions, Rendezvous, ranks_per_node, torchrun
from tests.runs.harness import TINY, advance, new_run, tiny
from tests.sft.harness import TINY as SFT

EIGHT = "parallelism.data_parallel_shard_degree=8"
ONE_STEP = ("steps=1", "comm.init_timeout_s=100", "eval.prompts=0", "training.token_budget=128", "training.eps=1e-6")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def on_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the first of two nodes from here on."""
    for name, value in {NODES: "2", ENDPOINT: f"127.0.0.1:{free_port()}", ADDRESS: "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)


def advance_with_the_other_node(ctx: Any, store: str, advance: Callable[[], Any]) -> None:
    """``advance`` the run ``ctx`` while the other node has joined it; both end well."""
    join = "import sys; from flows.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", join, "join", ctx.run_id, "--store", store]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as other:
        advance()
        assert len(ctx.trainer._trainer._pids) == 1, "the other rank belongs to the other node"
        ctx.close()
        _, said = other.communicate(timeout=60)
    assert other.returncode == 0, said


@pytest.mark.engine
def test_two_nodes_that_share_a_store_take_the_step_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_two_nodes(monkeypatch)
    store = str(tmp_path / "store")
    ctx = new_run(store, *ONE_STEP, "parallelism.data_parallel_shard_degree=2")
    advance_with_the_other_node(ctx, store, lambda: advance(ctx, 1))
    monkeypatch.delenv(NODES)
    alone = advance(new_run(str(tmp_path / "alone"), *ONE_STEP), 1)
    (entry,), (expected,) = ctx.ledger.entries(), alone.ledger.entries()
    for name in ("loss", "grad_norm", "entropy"):
        assert entry["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-5, abs=1e-6), name
    ours, theirs = (read_tensors(c.weights_dir(1)) for c in (ctx, alone))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-5, msg=name)
    checkpoint = ctx.store.open_published(f"runs/tiny/checkpoints/00000000-{entry['attempt']}/").files
    shares = {name.partition("-model")[0] for name in checkpoint}
    assert {"shard-00001", "shard-00002"} <= shares, "each node uploaded its share"


def test_the_torchrun_command_of_a_node_is_exact() -> None:
    rendezvous = Rendezvous.of_run("r1", "a", {NODES: "2", ENDPOINT: "node-1", ADDRESS: "node-2"})
    options = RankOptions.from_config(tiny(EIGHT, "comm.timeout_s=60"), "cuda", 3)
    words = torchrun(rendezvous, ranks_per_node(tiny(EIGHT), 2), options)
    assert words[0] == sys.executable
    assert shlex.join(words[1:]) == (
        "-m torch.distributed.run --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=node-1:29500 "
        "--rdzv-id=r1 --rdzv-conf=join_timeout=600 --local-addr=node-2 --max-restarts=0 "
        "-m forge_core.training.rank_main --device=cuda --threads=3 --timeout-s=60 --init-timeout-s=600"
    )


def test_one_host_meets_on_loopback_under_a_name_of_the_attempt() -> None:
    assert Rendezvous.of_run("r1", "a", {}) == Rendezvous("r1-a", 1, "127.0.0.1:0", "127.0.0.1")


@pytest.mark.parametrize("environ", [{NODES: "2"}, {NODES: "two"}, {NODES: "0"}])
def test_an_environment_that_is_not_a_rendezvous_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="FORGE_NNODES is "):
        Rendezvous.of_run("r1", "a", environ)


def config_file(folder: Path) -> str:
    (folder / "run file.yaml").write_text(yaml.safe_dump({k: v for k, v in TINY.items() if k != "run"}))
    return str(folder / "run file.yaml")


def slurm(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["slurm", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
for SLURM_NODEID in 0 1; do export SLURM_NODEID SLURMD_NODENAME=node-$SLURM_NODEID; "$@"; done
"""
FORGE = '#!/bin/bash\nprintf "%s|" "$SLURM_NODEID" "$FORGE_NNODES" "$FORGE_RDZV_ENDPOINT" "$FORGE_NODE_ADDRESS" '
FORGE += '"$FORGE_STORE" "$@"; echo\n'


def run_script(folder: Path, script: str) -> list[str]:
    """What the two nodes of a cluster that is not there run, a line each."""
    tools = {"srun": SRUN, "forge": FORGE, "scontrol": "#!/bin/bash\necho n1\necho n2\n"}  # what a cluster provides
    for name, text in tools.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    script = script.replace("export PATH=", f"export PATH={folder}:")
    environ = {**os.environ, "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]"}
    ran = subprocess.run(["bash"], input=script, text=True, check=True, capture_output=True, env=environ)
    return ran.stdout.splitlines()


TORCHRUN = "--nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$FORGE_RDZV_ENDPOINT"
COMMON = "2|n1:29500|node-{}|s3://bucket/forge|"  # what both nodes are told


def test_the_script_starts_the_run_on_the_first_node_and_joins_it_on_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path)
    words = ["--nodes", "2", "--gpus-per-node", "8", "--partition", "big", "--store", "s3://bucket/forge"]
    status, script, _ = slurm(capsys, file, *words, EIGHT, "rewards.functions=[{path: exact_match}]")
    assert status == 0
    assert script.splitlines()[:7] == [
        "#!/bin/bash", "#SBATCH --job-name=forge", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8",
        "#SBATCH --ntasks-per-node=1", "#SBATCH --partition=big", "#SBATCH --output=forge-%j.log",
    ]  # fmt: skip
    assert TORCHRUN in script
    assert run_script(tmp_path, script) == [
        f"0|{COMMON.format(0)}train|{file}|{EIGHT}|rewards.functions=[{{path: exact_match}}]|run.id=grpo-77|"
        "store=s3://bucket/forge|",
        f"1|{COMMON.format(1)}join|grpo-77|",
    ]


def test_the_script_of_a_supervised_run_fine_tunes_on_the_first_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "sft.yaml")
    Path(file).write_text(yaml.safe_dump({**SFT, "dataset": {**SFT["dataset"], "path": "talks.jsonl"}, "run": {}}))
    words = ["--sft", "--nodes", "2", "--gpus-per-node", "4", "--store", "s3://bucket/forge"]
    status, script, said = slurm(capsys, file, *words, EIGHT)
    assert status == 0, said
    assert TORCHRUN in script
    assert "--device=cuda" in script
    assert run_script(tmp_path, script) == [
        f"0|{COMMON.format(0)}sft|{file}|{EIGHT}|run.id=sft-77|store=s3://bucket/forge|",
        f"1|{COMMON.format(1)}join|sft-77|",
    ]
    status, script, said = slurm(capsys, file, *words, "parallelism.data_parallel_shard_degree=16")
    assert (status, script) == (2, "")
    assert "not enough GPUs: 8 are wanted" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "store: ./forge-store is a folder"),
        (["--store", "memory://x", "--shared-filesystem"], "store: memory://x exists in one process"),
        (["--store", "s3://b/p", "parallelism.data_parallel_shard_degree=7"], "parallelism: 7 ranks"),
        (["--store", "s3://b/p", "parallelism.data_parallel_shard_degree=32"], "not enough GPUs"),
    ],
)
def test_a_run_that_the_nodes_cannot_do_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORGE_STORE", raising=False)
    file = config_file(tmp_path)
    status, script, said = slurm(capsys, file, "--nodes", "2", "--gpus-per-node", "8", EIGHT, *words)
    assert (status, script) == (2, "")
    assert message in said


def test_without_gpus_per_node_gpus_that_are_wanted_are_missed_on_the_nodes_and_not_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--nodes", "2", "--store", "s3://b/p", EIGHT, "services.trainer.with_gpus=true"]
    status, _, said = slurm(capsys, config_file(tmp_path), *words)
    assert status == 2
    assert "a node has 0" in said
    assert "--gpus-per-node" in said


def test_a_shared_folder_is_a_store_of_all_nodes_when_the_user_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--nodes", "2", "--shared-filesystem", "--store", "stored", EIGHT, "run.id=r1"]
    status, script, _ = slurm(capsys, config_file(tmp_path), *words)
    assert status == 0
    assert f"export FORGE_STORE={tmp_path}/stored\n" in script
    assert "export RUN_ID=r1\n" in script
    assert "--device=cpu" in script
    assert "gpus-per-node" not in script
