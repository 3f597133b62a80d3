"""Several ranks train like one: data, tensor and pipeline parallel, on gloo processes, with the real GRPO loss."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from forge_core.models import probe
from forge_core.stop import Stopped, StopToken
from forge_core.training.logprob_head import Vocabulary, target_logprobs
from forge_core.training.logprob_kernels import FusedTargetLogprobs
from forge_core.training.trainer import TitanTrainer
from tests.training.rank_worker import STEPS, grpo_samples, join, spawn, totals_of, train, trainer_of
from tests.training.tiny_models import HEAD_VOCAB, head, saved

pytestmark = pytest.mark.engine

CLOSE = 1e-6  # of losses
WAIT_S = 2.0
HALF = STEPS // 2


def measured(trainer: TitanTrainer) -> dict[str, Any]:
    """Steps, then the log-probabilities and the digest of what they made, and a step with fewer samples than ranks."""
    found: dict[str, Any] = {"steps": train(trainer, range(STEPS))}
    found["logprobs"] = trainer.logprobs_samples(grpo_samples(9), temperature=0.9)
    found["digest"] = trainer.state_digest()
    few = grpo_samples(10, count=1)
    found["few"] = trainer.train_samples(few, totals=totals_of(few), temperature=1.0)[0].loss
    return found


def two_ranks(rank: int, out: Path, tied: Path, untied: Path) -> dict[str, Any]:
    data = trainer_of(tied, data_parallel=2, activation_checkpointing="full")
    found: dict[str, Any] = {"saved": train(data, range(HALF))}
    data.save(out / "checkpoint")
    data.push_weights(out / "weights")
    data.push_weights(out / f"weights-{rank}")
    found["saved_digest"] = data.state_digest()
    found["data"] = measured(trainer_of(tied, data_parallel=2))
    found["stopped"] = stopped_by_rank_one(data, rank)
    found["rounded"] = read_between_passes(trainer_of(tied, data_parallel=2, dtype="bfloat16"), out / "first")
    tensor = trainer_of(tied, tensor_parallel=2, activation_checkpointing="selective")
    found["tensor"] = measured(tensor)
    rounded = trainer_of(tied, tensor_parallel=2, dtype="bfloat16")
    found["tensor_rounded"] = train(rounded, range(STEPS))
    found["drifted"] = drifted(rounded, rank)
    found["head"] = divided_head()
    tensor.load(out / "checkpoint")
    tensor.push_weights(out / "tensor-weights")
    found["resumed_tensor"] = train(tensor, range(HALF, STEPS))
    stages = trainer_of(untied, pipeline_parallel=2, timeout_s=60.0)
    found["pipeline"] = measured(stages)
    found["stopped_stages"] = stopped_by_rank_one(stages, rank)
    stages.save(out / "stages")
    stages.push_weights(out / "stages-weights")
    return found


def read_between_passes(trainer: TitanTrainer, folder: Path) -> dict[str, Any]:
    """Digests and log-probabilities around what follows a forward pass without a backward one, which leaves gathered
    and rounded copies in place of parameters: a step, and a checkpoint that is loaded."""

    def logprobs() -> list[list[float]]:
        return trainer.logprobs_samples(given, temperature=1.0)

    given = grpo_samples(0)
    trainer.save(folder)
    found: dict[str, Any] = {"digest": trainer.state_digest(), "logprobs": logprobs(), "read": trainer.state_digest()}
    trainer.train_samples(given, totals=totals_of(given), temperature=1.0)
    found |= {"stepped": trainer.state_digest(), "of the step": logprobs()}
    trainer.load(folder)
    found |= {"loaded": trainer.state_digest(), "of the load": logprobs()}
    model = weakref.ref(trainer._model)
    trainer.cleanup()
    gc.collect()
    return found | {"freed": model() is None}


def drifted(trainer: TitanTrainer, rank: int) -> list[str]:
    """What becomes of the digest when rank 1's copy of a parameter that both hold is another."""
    (name, norm), *_ = ((n, p) for n, p in trainer._masters.trained.items() if n.endswith("ffn_norm.weight"))
    assert isinstance(norm, DTensor)
    if rank == 1:
        norm.to_local().data[0] += 1e-6
    with pytest.raises(RuntimeError) as caught:
        trainer.state_digest()
    return [name, str(caught.value)]


def divided_head() -> dict[str, list[Any]]:
    """Log-probabilities, entropies and gradients of a vocabulary of 31 that two ranks divide, by the code for GPUs and
    by the plain one."""
    part = Vocabulary.part(dist.group.WORLD, HEAD_VOCAB)
    return {
        name: [x.tolist() for x in head(function, 22, True, part)]
        for name, function in (("gpu", FusedTargetLogprobs.apply), ("plain", target_logprobs))
    }


def stopped_by_rank_one(trainer: TitanTrainer, rank: int) -> list[str]:
    """Only rank 1 is told to stop; what every rank makes of it, in a step and in log-probabilities."""
    token, given = StopToken(), grpo_samples(0)
    if rank == 1:
        token.set("Ctrl-C")

    def outcome(call: Callable[[], Any]) -> str:
        try:
            call()
        except Stopped as stop:
            return stop.reason
        return "went on"

    return [
        outcome(lambda: trainer.train_samples(given, totals=totals_of(given), temperature=1.0, stop=token)),
        outcome(lambda: trainer.logprobs_samples(given, temperature=1.0, stop=token)),
    ]


def waits_for_a_stage(rank: int, out: Path, untied: Path) -> tuple[str, float]:
    """Rank 1's error and its seconds, when the stage before it never sends anything."""
    trainer = trainer_of(untied, pipeline_parallel=2, timeout_s=WAIT_S)
    started, over = time.monotonic(), out / "over"
    if rank == 0:
        while not over.exists() and time.monotonic() < started + 5 * WAIT_S:
            time.sleep(0.1)
        assert over.exists(), "rank 1 waits on"
        error = ""
    else:
        with pytest.raises(RuntimeError) as caught:
            trainer.logprobs_samples(grpo_samples(0), temperature=1.0)
        over.touch()
        error = str(caught.value)
    seconds = time.monotonic() - started
    dist.destroy_process_group()
    join(rank, 2, out / "again")  # gloo has closed the connection
    return error, seconds


def four_ranks(rank: int, out: Path, tied: Path, untied: Path) -> dict[str, Any]:
    found = {"data_tensor": measured(trainer_of(tied, data_parallel=2, tensor_parallel=2))}
    found["pipeline_data"] = measured(trainer_of(untied, pipeline_parallel=2, data_parallel=2))
    found["pipeline_tensor"] = measured(trainer_of(untied, pipeline_parallel=2, tensor_parallel=2))
    return found


@pytest.fixture(scope="module")
def folders() -> tuple[Path, Path]:
    return saved("qwen3-tied")[0], saved("qwen2-untied")[0]


@pytest.fixture(scope="module")
def alone(folders: tuple[Path, Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    return measured(trainer_of(folders[0])), measured(trainer_of(folders[1]))


@pytest.fixture(scope="module")
def two(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("two")
    return out, spawn(partial(two_ranks, tied=folders[0], untied=folders[1]), 2, out)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["steps"]) == len(expected["steps"])
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=CLOSE)
        assert ours == pytest.approx(theirs, abs=1e-5)
    for ours, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert found["few"] == pytest.approx(expected["few"], abs=CLOSE)


@pytest.mark.parametrize(("name", "model"), [("data", 0), ("tensor", 0), ("pipeline", 1)])
def test_two_ranks_train_like_one(two: Any, alone: Any, name: str, model: int) -> None:
    _, ranks = two
    assert_same(ranks[0][name], alone[model])
    assert ranks[0][name] == ranks[1][name]


def test_ranks_that_hold_the_same_parameter_must_hold_the_same_numbers(two: Any) -> None:
    for name, error in (rank["drifted"] for rank in two[1]):
        assert error == f"the trainer's ranks hold different numbers in 1 parameters, such as {name}"


def test_a_vocabulary_that_two_ranks_divide_gives_what_one_rank_gives(two: Any) -> None:
    *whole, whole_weight = head(target_logprobs, 22, True)
    for code in ("gpu", "plain"):
        ranks = [[torch.tensor(x) for x in rank["head"][code]] for rank in two[1]]
        for *ours, _ in ranks:
            assert all(torch.allclose(x, y, atol=2e-5) for x, y in zip(ours, whole, strict=True))
        assert torch.allclose(torch.cat([weight for *_, weight in ranks]), whole_weight, atol=2e-5)


def test_two_ranks_that_divide_every_matrix_train_in_bfloat16_as_one_does(two: Any, folders: Any) -> None:
    alone = train(trainer_of(folders[0], dtype="bfloat16"), range(STEPS))
    first, second = (rank["tensor_rounded"] for rank in two[1])
    assert first == second
    for ours, theirs in zip(first, alone, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.01)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)


def test_a_forward_pass_alone_leaves_the_parameters_that_are_read_and_stepped(two: Any) -> None:
    for found in (rank["rounded"] for rank in two[1]):
        assert found["digest"] == found["read"] == found["loaded"] != found["stepped"]
        assert found["logprobs"] == found["of the load"] != found["of the step"]
        assert found["freed"]


def test_four_ranks_in_two_dimensions_train_like_one(folders: tuple[Path, Path], alone: Any, tmp_path: Path) -> None:
    ranks = spawn(partial(four_ranks, tied=folders[0], untied=folders[1]), 4, tmp_path)
    for name, model in (("data_tensor", 0), ("pipeline_data", 1), ("pipeline_tensor", 1)):
        assert_same(ranks[0][name], alone[model])
        assert all(rank[name] == ranks[0][name] for rank in ranks)


def test_a_checkpoint_of_two_ranks_goes_on_with_one_rank_and_with_other_ranks(
    two: Any, folders: tuple[Path, Path], alone: Any
) -> None:
    out, ranks = two
    trainer = trainer_of(folders[0])
    trainer.load(out / "checkpoint")
    assert trainer.state_digest() == ranks[0]["saved_digest"]
    steps = train(trainer, range(HALF, STEPS))
    for ours, tensor, whole in zip(steps, ranks[0]["resumed_tensor"], alone[0]["steps"][HALF:], strict=True):
        assert ours["loss"] == pytest.approx(whole["loss"], abs=CLOSE)
        assert tensor["loss"] == pytest.approx(ours["loss"], abs=CLOSE)


def test_a_checkpoint_of_pipeline_stages_is_a_whole_model(two: Any, folders: tuple[Path, Path], tmp_path: Path) -> None:
    out, _ = two
    trainer = trainer_of(folders[1])
    trainer.load(out / "stages")
    trainer.push_weights(tmp_path)
    assert_equal_tensors(tensors_of(out / "stages-weights"), tensors_of(tmp_path))
    assert_equal_probes(out / "stages-weights", tmp_path)


def test_ranks_divide_an_export_among_themselves(two: Any, folders: tuple[Path, Path], tmp_path: Path) -> None:
    out, _ = two
    trainer = trainer_of(folders[0])
    trainer.load(out / "checkpoint")
    trainer.push_weights(tmp_path)
    expected = tensors_of(tmp_path)
    assert_equal_tensors(tensors_of(out / "weights"), expected)
    parts = [{f.name for f in (out / f"weights-{rank}").glob("*.safetensors")} for rank in range(2)]
    assert parts[0]
    assert parts[1]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {f.name for f in (out / "weights").glob("*.safetensors")}
    assert not (out / "weights-1" / "config.json").exists()
    assert not (out / "weights-1" / probe.PROBE).exists()
    assert_equal_probes(out / "weights", tmp_path)
    assert_equal_probes(out / "tensor-weights", tmp_path)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder; its index, if any, must say where they are."""
    found: dict[str, torch.Tensor] = {}
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else None
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert weight_map is None or all(weight_map[name] == file.name for name in part)
        found |= part
    return found


def assert_equal_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_equal_probes(folder: Path, other: Path) -> None:
    ours, theirs = probe.read(folder), probe.read(other)
    assert ours is not None
    assert theirs is not None
    assert ours["token_ids"] == theirs["token_ids"]
    for found, expected in zip(ours["logprobs"], theirs["logprobs"], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["stopped", "stopped_stages"])
def test_a_stop_seen_by_one_rank_ends_all(two: Any, name: str) -> None:
    _, ranks = two
    assert [rank[name] for rank in ranks] == [["another rank was stopped"] * 2, ["Ctrl-C"] * 2]


def test_a_stage_waits_for_another_no_longer_than_the_limit(folders: tuple[Path, Path], tmp_path: Path) -> None:
    error, seconds = spawn(partial(waits_for_a_stage, untied=folders[1]), 2, tmp_path)[1]
    assert "Timed out waiting 2000ms for recv" in error
    assert seconds < WAIT_S + 2.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel": 2}, r"parallelism\.data_parallel_shard_degree 2 .* are 2 ranks, but .* has 1"),
        ({"tensor_parallel": 3}, r"parallelism\.tensor_parallel_degree: is 3.* 4 attention heads: use one of 1, 2"),
        ({"tensor_parallel": 4}, r"parallelism\.tensor_parallel_degree: is 4.* 2 key/value heads"),
        ({"pipeline_parallel": 2}, r"parallelism\.pipeline_parallel_degree: is 2.*tie_word_embeddings"),
        ({"float8": True}, r"quantize\.float8: is true, but the trainer is on cpu.*quantize\.float8=false"),
    ],
)
def test_what_a_model_or_a_machine_does_not_allow_is_refused_by_key(
    folders: tuple[Path, Path], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(folders[0], **settings)
