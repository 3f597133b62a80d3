"""The model is told of its tools: by its own chat template, in the prompt of every episode."""

from __future__ import annotations

from forge_core.data.prompts import Prompt
from forge_core.runs.context import RunContext
from tests.data.tokenizers import THINKING, tokenizer
from tests.runs.harness import memory, new_run


def prompt_of(*overrides: str) -> str:
    """What the policy of a run reads first."""
    ctx: RunContext = new_run(memory(), *overrides)
    ctx.tokenizer = tokenizer(THINKING)
    asked = Prompt(0, "p", [{"role": "user", "content": "6*7?"}], "42", "", {})
    return str(ctx.tokenizer.decode(ctx.encode(asked)))


def test_a_prompt_holds_the_definitions_of_the_environments_tools():
    shown = prompt_of("environment.path=calculator")
    assert '"name": "calculate"' in shown
    assert '"required": ["expression"]' in shown
    assert "Compute an arithmetic expression exactly." in shown
    assert shown.endswith("<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n")
    assert "calculate" not in prompt_of()
