"""docs/migrating.md row by row: what it says is here is here, what is not has a reason, and hints say the same."""

from __future__ import annotations

import asyncio
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from typing import Any

import pytest
import torch
import yaml

from flows.cli import BAD_INPUT, main, parser
from forge_core.config import ConfigError, RunConfig, load_config
from forge_core.config.explain import unknown_key
from forge_core.config.hints import TORCHFORGE_NAMES, suggestions
from forge_core.config.keys import field_at, key_fields, keys_of
from forge_core.config.left_out import LEFT_OUT, pattern_of, reason_for
from forge_core.config.run_gate import validate_for_training
from forge_core.config.section import Section
from forge_core.config.sft_config import SftConfig
from forge_core.config.sft_loader import load_sft_config, validate_for_sft
from forge_core.config.yaml_text import load_yaml
from forge_core.observability.catalogue import known
from tests.docs.documents import MIGRATING, ROOT, Block, blocks

KEY_TABLES: dict[str, type[Section]] = {"key of torchforge": RunConfig, "key of torchforge's SFT": SftConfig}
CODE = [*(ROOT / "forge_core").rglob("*.py"), ROOT / "Makefile", *(ROOT / "scripts").iterdir()]
LIBRARIES = {"HF_TOKEN", "CUDA_VISIBLE_DEVICES"}  # read by huggingface_hub and torch, too


@dataclass(frozen=True)
class Row:
    table: str
    old: list[str]
    ours: list[str]  # empty: none
    cell: str
    note: str

    def __str__(self) -> str:
        return self.old[0]


def rows() -> Iterator[Row]:
    """The rows of the tables with what is here in their second column."""
    for table in re.findall(r"(?:^\|.*\n)+", MIGRATING.read_text(), flags=re.M):
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        if cells[0][1:] == ["Forge", ""]:
            yield from (
                Row(cells[0][0], _names(old) or [old], _names(ours), ours, note) for old, ours, note in cells[2:]
            )


def _names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


ROWS = list(rows())
KEY_ROWS = [row for row in ROWS if row.table in KEY_TABLES]
each_row = pytest.mark.parametrize("row", ROWS, ids=str)
each_key = pytest.mark.parametrize("row", KEY_ROWS, ids=str)


def test_the_tables_are_found():
    assert len(ROWS) > 350
    assert len(KEY_ROWS) > 120
    assert {row.table for row in ROWS} == {"torchforge", *KEY_TABLES}


@each_row
def test_what_a_row_names_is_here_or_there_is_a_reason(row: Row):
    if row.cell == "none":
        assert row.note
    else:
        assert row.ours, row.cell
        assert [name for name in row.ours if not is_here(name)] == []


def is_here(name: str) -> bool:
    """Whether a name of the second column exists, whatever kind it is."""
    if name.startswith("forge "):
        return parses(name)
    if name.startswith("make "):
        return f"\n{name.removeprefix('make ')}:" in (ROOT / "Makefile").read_text()
    if re.fullmatch(r"[A-Z][A-Z_]+", name):
        return name in LIBRARIES or any(re.search(rf"\b{name}\b", file.read_text()) for file in CODE)
    if name.startswith("forge_core."):
        return resolves(name)
    if re.search(r"\.(py|md|yaml|yml|toml)$", name):
        return (ROOT / name).is_file()
    return is_key(name) or any(known(name, runs) for runs in ("grpo", "sft"))


def parses(command: str) -> bool:
    args, extra = parser().parse_known_args(shlex.split(command)[1:])
    overrides = [*getattr(args, "overrides", []), *extra]
    with keys_of(SftConfig if args.command == "sft" else RunConfig):
        return all(field_at(word.lstrip("~").partition("=")[0]) for word in overrides)


def is_key(name: str) -> bool:
    found = []
    for model in (RunConfig, SftConfig):
        with keys_of(model):
            found.append(name in key_fields())
    return any(found)


def resolves(path: str) -> bool:
    """Import the module that ``path`` begins with, and follow the rest of it."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name and path.startswith(error.name):
                continue
            raise
        for part in parts[end:-1]:
            found = getattr(found, part)
        return end == len(parts) or _has(found, parts[-1])
    return False


def _has(found: Any, name: str) -> bool:
    """Whether a module or class has an attribute; of a class also a field, or an attribute that it only declares."""
    declared = {field.name for field in fields(found)} if is_dataclass(found) else getattr(found, "__annotations__", {})
    return hasattr(found, name) or name in declared


@each_key
def test_an_old_key_is_answered_as_the_row_says(row: Row):
    with keys_of(KEY_TABLES[row.table]):
        for old in row.old:
            if row.cell == "none":
                reason = reason_for(old)
                assert reason
                assert row.note.startswith(reason)
                assert reason in unknown_key(old)[0]
            elif old not in row.ours:
                assert old not in key_fields()
                assert suggestions(old) == row.ours
                assert reason_for(old) is None
            else:
                assert old in key_fields()


def test_every_old_name_that_hints_know_is_in_a_table():
    old = [name for row in KEY_ROWS for name in row.old]
    assert [name for name in TORCHFORGE_NAMES if not any(f".{key}".endswith(f".{name}") for key in old)] == []
    assert [name for name in LEFT_OUT if not any(pattern_of(name).search(key) for key in old)] == []


@pytest.mark.parametrize("model", KEY_TABLES.values())
def test_no_key_that_is_left_out_hides_one_of_ours(model: type[Section]):
    with keys_of(model):
        assert [key for key in key_fields() if reason_for(key)] == []


def example(command: str) -> dict[str, Any]:
    """The configuration of the document that is for ``command``."""
    tree, problems = load_yaml(_block(command).text)
    assert problems == []
    return tree


def _block(words: str, language: str = "") -> Block:
    return next(block for block in blocks(MIGRATING) if block.language == language and words in block.text)


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@pytest.mark.parametrize(("command", "load"), [("apps.grpo.main", load_config), ("apps.sft.main", load_sft_config)])
def test_an_old_configuration_is_answered_key_by_key(command, load):
    with pytest.raises(ConfigError) as caught:
        load(example(command))
    answers = (
        "did you mean",
        "there is none of this meaning",
        "model.vocabulary: is missing",
    )  # a section: a new model
    assert [p for p in caught.value.problems if not any(answer in p for answer in answers)] == []
    assert len(caught.value.problems) >= 20


def test_the_command_says_it(tmp_path, capsys):
    (tmp_path / "old.yaml").write_text(_block("apps.grpo.main").text)
    assert main(["config", str(tmp_path / "old.yaml")]) == BAD_INPUT
    assert "group_size: unknown key: did you mean grpo.n_samples?" in capsys.readouterr().err


def test_a_configuration_of_the_guide_for_several_gpus_loads():
    generator = {"procs": 2, "num_replicas": 1, "with_gpus": True}
    degrees = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1, "data_parallel_shard_degree": 2}
    services = {"generator": generator, "trainer": dict(generator)}
    config = load_config({"model": "org/llama", "parallelism": degrees, "services": services})
    assert config.services.generator.procs == config.parallelism.tensor_parallel_degree == 2


def test_the_new_configuration_says_what_the_old_one_did():
    """Each value of the example before stands under the key that the tables name for it."""
    config = load_config(yaml.safe_load(_block("off_by_n", "yaml").text))
    assert _compared("apps.grpo.main", config) > 30
    assert config.model == "Qwen/Qwen3-1.7B"
    assert validate_for_training(load_config(config, ["generator.backend=hf"]), gpus=3) == []


def test_the_new_supervised_configuration_says_what_the_old_one_did():
    config, old = load_sft_config(example("forge sft")), example("apps.sft.main")
    with keys_of(SftConfig):
        scaled = ("training.local_batch_size", "training.steps", "training.dataset", "checkpoint.interval")
        assert _compared("apps.sft.main", config, leave_out=(*scaled, "checkpoint.folder")) > 10
    assert config.model == old["model_name"]
    assert validate_for_sft(config, gpus=8) == []
    assert config.steps * config.training.sync_interval == old["training"]["steps"]
    assert config.checkpoint.interval * config.training.sync_interval == old["checkpoint"]["interval"]
    assert config.training.batch_size == old["training"]["local_batch_size"] * old["processes"]["procs"]


def _compared(command: str, config: Section, leave_out: tuple[str, ...] = ()) -> int:
    """How many values of an old configuration are those of ``config`` under their new keys; all must be."""
    found = 0
    for key, value in _leaves(example(command)):
        new = key if key in key_fields() else next(iter(suggestions(key)), None)
        if reason_for(key) or new in ("model", "rewards.workers", None) or key in leave_out:
            continue
        assert reduce(getattr, new.split("."), config) == value, (key, new)
        found += 1
    return found


def _python(word: str) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(_block(word, "python").text, scope)
    return scope


def test_the_reward_of_the_guide_grades():
    reward = _python("class MathReward")["MathReward"]()
    assert reward.grade("2+2?", r"so \boxed{4}", {"answer": "4"}) == 1.0
    assert reward.grade("2+2?", r"so \boxed{5}", {"answer": "4"}) == 0.0
    assert reward.grade("2+2?", "4", {"answer": "4"}) == 0.0


def test_the_loss_of_the_guide_gives_a_gradient():
    loss = _python("class CustomLoss")["CustomLoss"](clip_range=0.2, beta=0.1)
    logits = torch.randn(2, 4, 10, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ids, mask = torch.arange(8).view(2, 4), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    logprobs = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0].detach()
    value, metrics = loss(logits, ids, torch.ones(2, 4), logprobs, mask, logprobs)
    value.backward()
    assert value.item() == pytest.approx(-1.0)  # on-policy, at the reference, advantage 1
    assert metrics == {"pg_loss": pytest.approx(-1.0), "kl": pytest.approx(0.0), "ratio_mean": pytest.approx(1.0)}
    assert logits.grad is not None
    assert [bool(row.norm() > 0) for row in logits.grad[0]] == [True, True, False, False]


def test_the_service_answers(tmp_path, monkeypatch):
    (tmp_path / "migrated_judge.py").write_text(_block("class Judge", "python").text)
    monkeypatch.syspath_prepend(tmp_path)
    grades = asyncio.run(importlib.import_module("migrated_judge").grade_all(["a" * 50, "a" * 200]))
    assert grades == [0.5, 1.0]
