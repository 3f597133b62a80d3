"""What can be known about prompts before any engine is loaded: whether they fit, and whether the model knows them.

Guarantees:
- Nothing is truncated, here or later: a prompt that is too long is dropped with its reason and counted in the ledger.
- Lengths are counted with the model's own tokenizer but without its chat template, so they are lower bounds: what is
  refused here could never have been trained on.
- The first ``LOOKED_AT`` prompts are looked at, for duplicates all of them. Neither torch nor transformers is imported,
  and no hub is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forge_core.config import ConfigError, RunConfig
from forge_core.config.data_sections import DatasetSection, ScratchModel
from forge_core.data.errors import DataError
from forge_core.data.prompts import Prompt, PromptSet, load_prompts, split_holdout
from forge_core.models.special import without_special
from forge_core.rewards.resolve import needs_answer

LOOKED_AT = 256
LOCAL = ("python://", "reasoning_gym://")


def check_prompts(config: RunConfig) -> list[str]:
    """Warnings about prompts that will be dropped. Raises ConfigError when all would be, DataError for a character
    that the vocabulary of a model made on the spot lacks."""
    assert config.dataset is not None
    prompts = _first(config.dataset, config.run.seed, "dataset")
    if config.environment is not None and any("environment" in prompt.metadata for prompt in prompts):
        raise ConfigError(
            "dataset: its column environment would be taken for what the run's environment reports: rename the column"
        )
    if isinstance(config.model, ScratchModel):
        _check_characters(prompts, config.model, "dataset")
        if config.warm_start is not None:
            demonstrations = _first(config.warm_start.dataset, config.run.seed, "warm_start.dataset")
            _check_characters(demonstrations, config.model, "warm_start.dataset", targets=True)
    count = _token_counter(config) if prompts else None
    return _check_lengths(config, [count(_text(prompt)) for prompt in prompts]) if count else []


def trained_and_evaluated(config: RunConfig, prompts: PromptSet) -> tuple[list[Prompt], list[Prompt]]:
    """All prompts of the run's set that are trained on, and all that may be evaluated (also of ``eval.split``)."""
    section, split = config.dataset, config.eval.split
    assert section is not None
    if split and config.eval.prompts:
        other = load_prompts(section.model_copy(update={"split": split}), seed=config.run.seed, key="eval")
        return list(prompts), list(other)
    train, held = split_holdout(prompts, config.eval.holdout if config.eval.prompts else 0.0)
    return [prompts[row] for row in train], [prompts[row] for row in held]


def prompt_warnings(config: RunConfig, prompts: PromptSet) -> list[str]:
    """What a person should know when a run begins: prompts that no answer could be right for, equal prompts, and those
    of ``eval.split`` that are trained on too. ``forge data`` lists them, and near duplicates."""
    ids = prompts.prompt_ids
    found = {"rows repeat an earlier prompt": len(ids) - len(set(ids))}
    if config.eval.split and config.eval.prompts:
        evaluated = trained_and_evaluated(config, prompts)[1]
        found[f"prompts of eval.split={config.eval.split} are trained on too"] = len(
            {prompt.prompt_id for prompt in evaluated} & set(ids)
        )
    told = [f"dataset.path: {count} {what}: forge data CONFIG lists them" for what, count in found.items() if count]
    missing = prompts.unanswered if any(needs_answer(path) for path in config.rewards.paths) else 0
    lacking = f"dataset.path: {missing} of {len(prompts)} rows have no answer, so no response to them can be right"
    return [lacking, *told] if missing else told


def _first(dataset: DatasetSection, seed: int, key: str) -> list[Prompt]:
    """The first prompts of a set on this machine; none of a set on the hub."""
    if not dataset.path.startswith(LOCAL) and not Path(dataset.path).is_file():
        return []
    size = min(LOOKED_AT, dataset.size or LOOKED_AT)
    return list(load_prompts(dataset.model_copy(update={"size": size}), seed=seed, key=key))


def _text(prompt: Prompt) -> str:
    return "".join(message["content"] for message in prompt.messages)


def _check_characters(prompts: list[Prompt], model: ScratchModel, key: str, *, targets: bool = False) -> None:
    """A character tokenizer leaves out what it does not know, so the model would be asked something else."""
    known = set(model.vocabulary)
    for prompt in prompts:
        text = _text(prompt) + (prompt.target or "" if targets else "")
        if unknown := set(without_special(text)) - known:
            raise DataError(
                f"{key}.path: row {prompt.row}, {text[:80]!r}, has the characters {sorted(unknown)}, which "
                "model.vocabulary lacks: add them there, or change the data"
            )


def _token_counter(config: RunConfig) -> Callable[[str], int] | None:
    """Tokens of a text; None where that cannot be known without loading transformers."""
    from forge_core.models.stored import configured_model

    if isinstance(config.model, ScratchModel):
        return len  # a token a character
    file = configured_model(config) / "tokenizer.json"
    if not file.exists():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _check_lengths(config: RunConfig, lengths: list[int]) -> list[str]:
    limit, response = config.max_prompt_tokens, config.rollout.max_new_tokens
    longer = [n for n in lengths if n > limit]
    if not longer:
        return []
    source = "" if config.rollout.max_prompt_tokens else " (training.seq_len less rollout.max_new_tokens)"
    what = (
        f"rollout.max_prompt_tokens: is {limit}{source}, and {len(longer)} of the first {len(lengths)} prompts of "
        f"dataset.path are longer (up to {max(longer)} tokens)"
    )
    remedy = f"training.seq_len={max(longer) + response} would hold them"
    if len(longer) == len(lengths):
        raise ConfigError(f"{what}: prompts are dropped, never truncated, so nothing is left to train on: {remedy}")
    return [f"{what}: such prompts are dropped as prompt_too_long, never truncated; {remedy}"]
