"""What a real ``forge`` process answers: 0 success, 1 failure, 2 bad input, 130 stopped (see ``test_stop.py``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.server import ServerHandle
from forge_core.runs.failures import failures
from forge_core.store import layout, open_store
from tests.faults.processes import Forge, write_config
from tests.faults.stored import Stored
from tests.runs.harness import TINY

REWARD = """
from pathlib import Path

def grade(prompt, completion, metadata):
    if Path(__file__).with_name("down").exists():
        raise ConnectionError("the verifier does not answer")
    return sum(c in "01234" for c in completion[:3]) / 3
"""


@pytest.mark.server
@pytest.mark.engine
def test_a_failed_run_says_why_and_goes_on_once_the_cause_is_mended(
    started: Callable[..., Forge], prefect_server: ServerHandle, tmp_path: Path
) -> None:
    """Two starts of ``forge``, of some ten seconds of imports each."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "down").touch()
    config = write_config(
        tmp_path, TINY | {"rewards": {"functions": [{"path": "reward.py:grade"}]}, "eval": {"prompts": 0}}
    )
    failed = started("train", config)
    assert failed.wait() == 1, failed.output
    last = failed.output.splitlines()[-5:]
    assert any("RewardError" in line and "the verifier does not answer" in line for line in last), last
    assert any("forge resume tiny" in line for line in last), last
    assert any("in score of batch 0, shard" in line for line in last), last
    assert failed.orphans() == []
    store = open_store(str(tmp_path / "store"), probe=False)
    (told,) = failures(store, store.list(layout.run("tiny")))
    assert (told.role, "the verifier does not answer" in told.error) == ("run", True), "said to those who watch, too"
    (tmp_path / "down").unlink()
    resumed = started("resume", "tiny", "--store", tmp_path / "store")
    assert resumed.wait() == 0, resumed.output
    assert Stored(tmp_path / "store").ledger.verify() == TINY["steps"]
    again = started("train", config)
    assert again.wait() == 2, again.output
    assert "forge resume tiny" in again.output, "an existing run is never continued silently"


def test_bad_input_is_refused_before_anything_is_stored(started: Callable[..., Forge], tmp_path: Path) -> None:
    refused = started("train", write_config(tmp_path, TINY | {"stepps": 3}))
    assert refused.wait(60) == 2, refused.output
    assert "stepps" in refused.output
    assert not (tmp_path / "store/runs").exists()
