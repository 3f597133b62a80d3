"""Moving to newer policy versions: what serves, what is refused, and what stays."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.generation.hf import HFGenerator
from forge_core.models import probe
from forge_core.models.errors import WeightsError
from tests.generation.conftest import make_folder, mixed_requests, reference_logprobs, reference_model, request

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("versions")
    return {v: make_folder(root / str(v), seed=v) for v in range(3)}


@pytest.fixture
def engine(versions) -> Iterator[HFGenerator]:
    engine = HFGenerator(versions.__getitem__, version=0, threads=1)
    yield engine
    engine.shutdown()


def rewritten(source: Path, folder: Path, change: Callable[[dict], dict]) -> Path:
    shutil.copytree(source, folder)
    save_file(change(load_file(source / "model.safetensors")), folder / "model.safetensors")
    return folder


def test_after_an_update_the_new_weights_sample(engine, versions):
    old = engine.generate(mixed_requests())
    engine.update_weights(2)
    assert engine.get_version() == 2
    model = reference_model(versions[2])
    new = engine.generate(mixed_requests())
    assert [c.token_ids for c in new] != [c.token_ids for c in old]
    for completion in new:
        assert completion.logprobs == pytest.approx(reference_logprobs(model, completion, 1.0).tolist(), abs=1e-5)
        assert completion.metadata["policy_version"] == 2
        assert [s.version for s in completion.metadata["version_spans"]] == [2]


def test_an_updated_engine_equals_a_fresh_one_bit_for_bit(engine, versions):
    engine.update_weights(1)
    fresh = HFGenerator(versions.__getitem__, version=1, threads=1)
    assert engine.generate(mixed_requests()) == fresh.generate(mixed_requests())
    fresh.shutdown()


def test_an_older_version_is_refused_and_the_served_one_is_a_no_op(versions):
    asked: list[int] = []

    def weights(version: int) -> Path:
        asked.append(version)
        return versions[version]

    engine = HFGenerator(weights, version=1, threads=1)
    engine.update_weights(1)
    with pytest.raises(ValueError, match="version 0 is not newer than 1"):
        engine.update_weights(0)
    assert engine.get_version() == 1
    assert asked == [1]
    engine.shutdown()


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def edit(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")

    return apply


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors cannot be read"),
        (edit(lambda t: {k: v for k, v in t.items() if k != NORM}), f"{NORM} is missing"),
        (edit(lambda t: {**t, "extra": torch.zeros(2)}), "extra is unknown"),
        (edit(lambda t: {**t, NORM: torch.ones(31)}), rf"{NORM} has shape \[31\], expected \[32\]"),
        (edit(lambda t: {**t, NORM: torch.full((32,), torch.nan)}), f"{NORM} holds values that are not finite"),
        (edit(lambda t: {**t, NORM: torch.ones(32, dtype=torch.int32)}), "int32, expected floating point"),
        (edit(lambda t: {**t, "lm_head.weight": torch.zeros(21, 32)}), "lm_head.weight that differs"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
    ],
)
def test_damaged_weights_are_refused_and_the_old_version_keeps_serving(damage, message, versions, tmp_path):
    folder = shutil.copytree(versions[1], tmp_path / "damaged")
    damage(folder)
    engine = HFGenerator(lambda v: folder if v == 1 else versions[v], version=0, threads=1)
    before = engine.generate(mixed_requests())
    with pytest.raises((WeightsError, ValueError), match=message):
        engine.update_weights(1)
    assert engine.get_version() == 0
    assert engine.generate(mixed_requests()) == before
    engine.update_weights(2)
    assert engine.get_version() == 2
    engine.shutdown()


def publish_probe(folder: Path, of: Path) -> None:
    """Put into ``folder`` what the weights of another folder compute."""
    model, ids = reference_model(of), torch.tensor(probe.sequences(21, 200))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(2, ids[:, 1:, None]).squeeze(2)
    probe.write(folder, ids.tolist(), logprobs.tolist(), "float32")


def test_weights_that_do_not_compute_what_was_published_are_refused(versions, tmp_path):
    folder = shutil.copytree(versions[1], tmp_path / "wrong")
    publish_probe(folder, of=versions[2])
    engine = HFGenerator(lambda v: folder if v == 1 else versions[v], version=0, threads=1)
    before = engine.generate(mixed_requests())
    with pytest.raises(WeightsError, match="not what the trainer published"):
        engine.update_weights(1)
    assert engine.get_version() == 0
    assert engine.generate(mixed_requests()) == before
    with pytest.raises(WeightsError, match="probe of version 1"):
        HFGenerator(lambda v: folder, version=1, threads=1)
    publish_probe(folder, of=versions[1])
    engine.update_weights(1)
    assert engine.get_version() == 1
    engine.shutdown()


def test_a_tied_head_follows_the_embedding(versions, tmp_path):
    both = rewritten(
        versions[2], tmp_path / "both", lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()}
    )
    engine = HFGenerator(lambda v: both if v == 2 else versions[v], version=0, threads=1)
    engine.update_weights(2)
    model = reference_model(versions[2])
    for completion in engine.generate(mixed_requests()):
        assert completion.logprobs == pytest.approx(reference_logprobs(model, completion, 1.0).tolist(), abs=1e-5)
    engine.shutdown()


def test_sharded_weights_load(versions, tmp_path):
    model = reference_model(versions[1])
    sharded = shutil.copytree(versions[1], tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    model.save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    engine = HFGenerator(lambda v: sharded if v == 1 else versions[v], version=0, threads=1)
    engine.update_weights(1)
    for completion in engine.generate(mixed_requests()):
        assert completion.logprobs == pytest.approx(reference_logprobs(model, completion, 1.0).tolist(), abs=1e-5)
    next(iter(sharded.glob("*.safetensors"))).unlink()
    with pytest.raises(ValueError, match=r"lacks model-0000\d-of"):
        HFGenerator(lambda v: sharded, version=1, threads=1)
    engine.shutdown()


def test_an_update_waits_for_the_running_call_and_goes_before_queued_ones(engine, versions):
    requests = [request("s:47120=", seed, max_new_tokens=200) for seed in range(400)]
    results: dict[str, list] = {}

    def generate(name: str) -> None:
        results[name] = engine.generate(requests)

    first = threading.Thread(target=generate, args=("first",))
    first.start()
    time.sleep(0.1)  # the first call is being worked on
    second = threading.Thread(target=generate, args=("second",))
    second.start()
    engine.update_weights(1)
    first.join()
    second.join()
    assert {c.metadata["policy_version"] for c in results["first"]} == {0}
    assert {c.metadata["policy_version"] for c in results["second"]} == {1}
    for version, name in ((0, "first"), (1, "second")):
        model = reference_model(versions[version])
        for completion in results[name][:20]:
            expected = reference_logprobs(model, completion, 1.0)
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
