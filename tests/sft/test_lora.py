"""Adapters: trained alone, resumed exactly, exported merged and for peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.runs.sft_context import SftContext
from forge_core.weights.host_cache import keep_published
from tests.sft.harness import advance, decided, memory, new_run, reopened

pytestmark = pytest.mark.engine
LORA = ("lora.rank=4", "lora.alpha=8", "steps=3")


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def adapter(ctx: SftContext, version: int) -> Path:
    return keep_published(ctx.store, ctx.ledger.required(version - 1)["adapter"])


@pytest.fixture(scope="module")
def trained(data: Path) -> SftContext:
    ctx = advance(new_run(memory(), data, *LORA), 3)
    ctx.close()
    return ctx


def test_peft_loads_the_adapter_and_computes_what_the_merged_model_does(trained: SftContext):
    from peft import PeftModel

    tokens = torch.arange(2, 20)[None]
    with torch.no_grad():
        merged = loaded(trained.weights_dir(3))(tokens).logits
        base = loaded(trained.weights_dir(0))
        before = base(tokens).logits
        after = PeftModel.from_pretrained(base, adapter(trained, 3)).eval()(tokens).logits
    torch.testing.assert_close(after, merged, rtol=1e-4, atol=1e-5)
    assert (after - before).abs().max() > 0.1


def test_only_adapted_matrices_change_and_the_loss_falls(trained: SftContext):
    before, after = (loaded(trained.weights_dir(version)).state_dict() for version in (0, 3))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    adapted = {name for name in before if name.endswith("_proj.weight")}
    assert changed == adapted
    losses = [e["metrics"]["validation/loss"] for e in trained.ledger.entries()]
    assert losses[-1] < losses[0]


def test_a_resumed_run_of_adapters_equals_the_uninterrupted_one(trained: SftContext, data: Path):
    begun = advance(new_run(memory(), data, *LORA), 1)
    assert decided(advance(reopened(begun), 3)) == decided(trained)


def test_checkpoints_hold_the_adapters_alone(trained: SftContext):
    from forge_core.runs.trainer_session import newest_checkpoint

    found = newest_checkpoint(trained, 3)
    assert found is not None
    size = sum(f.size for f in trained.store.open_published(found[1]).manifest.files if "model-" in f.name)
    model = sum(f.size for f in trained.store.open_published(trained.ledger.weights_prefix(0)).manifest.files)
    assert size < model


def test_a_subset_of_matrices_may_be_adapted(data: Path):
    ctx = advance(new_run(memory(), data, "lora.rank=2", "lora.targets=[q_proj,o_proj]", "steps=1"), 1)
    before, after = (loaded(ctx.weights_dir(version)).state_dict() for version in (0, 1))
    changed = {name.split(".")[-2] for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {"q_proj", "o_proj"}


def test_frozen_weights_are_never_there_in_float32(trained: SftContext):
    from forge_core.training.architecture import read_architecture
    from forge_core.training.settings import LoraSettings, TrainerSettings
    from forge_core.training.titan_parallel import build_model

    made = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.device.type == "cpu":
                made.append((result.dtype, tuple(result.shape)))
            return result

    lora = LoraSettings(rank=4, alpha=8, targets=("q_proj",), seed=0, base="x")
    settings = TrainerSettings(seq_len=32, token_budget=64, dtype="bfloat16", lora=lora)
    with Allocations():
        model, _ = build_model(read_architecture(trained.weights_dir(0)), settings, torch.device("cpu"))
    kinds = {name: (p.dtype, tuple(p.shape)) for name, p in model.named_parameters()}
    frozen = {kind for name, kind in kinds.items() if "lora_" not in name}
    assert {dtype for dtype, _ in frozen} == {torch.bfloat16}
    assert {dtype for name, (dtype, _) in kinds.items() if "lora_" in name} == {torch.float32}
    assert not {(torch.float32, shape) for _, shape in frozen} & set(made)


def test_frozen_weights_of_the_compute_type_are_merged_in_float32(data: Path):
    """The matrix of a version is the frozen one plus the adapter's product, rounded once."""
    ctx = advance(new_run(memory(), data, *LORA, "training.dtype=bfloat16"), 3)
    base, merged = (loaded(ctx.weights_dir(version)).state_dict() for version in (0, 3))
    low = load_file(adapter(ctx, 3) / "adapter_model.safetensors")
    for name in (name for name in base if name.endswith("_proj.weight")):
        a, b = (low[f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"] for part in "AB")
        exact = torch.addmm(base[name].bfloat16().float(), b, a, alpha=8 / 4)
        assert torch.equal(merged[name], exact.bfloat16().float())
