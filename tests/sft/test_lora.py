"""Adapters: trained alone, resumed exactly, exported merged and for peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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
