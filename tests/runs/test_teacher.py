"""A teacher is found and hashed once, and stays while it teaches."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forge_core.evaluation import policies
from forge_core.models.errors import ModelError
from forge_core.models.stored import RunVersion, stored_model
from forge_core.runs.context import RunContext
from forge_core.runs.record import create_run, load_run, resume_run
from forge_core.runs.reference_session import reference_digest
from forge_core.runs.removal import references
from forge_core.runs.stages import reference_request
from forge_core.store import Ledger, Store, layout, open_store
from forge_core.store.deletion import delete_objects
from tests.runs.harness import memory, new_run, tiny
from tests.sft.teachers import teacher
from tests.store.entries import RUN, init_entry

DISTILS = ("loss.name=distill", "grpo.beta=1.0", "eval.prompts=0")


def taught(store: Store, folder: Path) -> RunContext:
    """A run that distils version 0 of the run ``RUN``, which has the weights of ``folder``."""
    ledger = Ledger(store, RUN)
    ledger.commit_init(init_entry())
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    store.publish(ledger.weights_prefix(0), files, request="r")
    return new_run(store, *DISTILS, f"loss.teacher=run://{RUN}/0", f"store={store.uri}")


def collect_the_teacher(store: Store) -> None:
    delete_objects(store, store.list(f"{layout.run(RUN)}weights"))


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are hashed from now on."""
    files, real = list[Path](), policies.data_digest

    def noted(file: Path) -> Any:
        files.append(file)
        time.sleep(0.02)  # a teacher is large: others ask meanwhile
        return real(file)

    monkeypatch.setattr(policies, "data_digest", noted)
    return files


def test_a_teacher_is_hashed_once_for_all_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ctx = new_run(memory(), *DISTILS, f"loss.teacher={teacher(tmp_path)}")
    files = hashed(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        requests = set(pool.map(lambda _: reference_request(ctx, "content", None), range(8)))
    assert len(requests) == 1
    assert len(files) == len(set(files)) > 0


def test_the_collector_of_the_run_that_teaches_ends_no_distillation(tmp_path: Path):
    store = open_store(memory())
    ctx = taught(store, teacher(tmp_path))
    before, folder = reference_digest(ctx), ctx.teacher.folder
    collect_the_teacher(store)
    assert reference_digest(ctx) == before
    assert (ctx.teacher.folder, (folder / "config.json").exists()) == (folder, True)


def test_a_version_that_a_process_has_found_once_it_has_for_good(tmp_path: Path):
    """As when a teacher is deleted between the checks of a run and its first reference log-probabilities."""
    store = open_store(memory())
    ctx = taught(store, teacher(tmp_path))
    folder = stored_model(store, RunVersion(RUN, 0))
    collect_the_teacher(store)
    assert ctx.teacher.folder == folder
    with pytest.raises(ModelError, match="has the versions 0 to 0"):
        stored_model(store, RunVersion(RUN, 1))


def test_a_version_that_was_deleted_before_is_refused(tmp_path: Path):
    store = open_store(memory())
    ctx = taught(store, teacher(tmp_path))
    collect_the_teacher(store)
    with pytest.raises(ModelError, match="its weights were deleted"):
        reference_digest(ctx)


def test_who_distils_a_run_needs_it(tmp_path: Path):
    store = open_store(memory())
    taught(store, teacher(tmp_path))
    assert references(store, RUN) == [f"the run tiny distils run://{RUN}/0"]
    assert references(store, "other") == []


def test_the_teacher_that_a_resume_has_chosen_is_the_one_that_is_needed(tmp_path: Path):
    store = open_store(memory())
    record = create_run(store, tiny(*DISTILS, "loss.teacher=run://before/1"))
    changed = tiny(*DISTILS, "loss.teacher=run://afterwards/1")
    resume_run(store, record, changed, ["loss.teacher"])
    assert load_run(store, "tiny").changes == 1
    assert references(store, "afterwards") == ["the run tiny distils run://afterwards/1"]
    assert references(store, "before") == []
