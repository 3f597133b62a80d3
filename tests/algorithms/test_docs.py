"""The documents of the algorithm library do what they say."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from forge_core.algorithms.losses import CORRECTIONS, LOSSES, PolicyLoss, build_loss, check_loss
from forge_core.algorithms.losses.custom import CustomLoss
from forge_core.algorithms.losses.probe import probe
from forge_core.config import ConfigError, load_config
from forge_core.config.keys import choices, key_fields
from forge_core.runs.checks import check_run
from forge_core.runs.record import code_digests
from tests.algorithms.batches import EVERY_LOSS, random_rows
from tests.runs.harness import TINY

DOCS = Path(__file__).parents[2] / "docs"
ALGORITHMS = (DOCS / "algorithms.md").read_text()
CUSTOM = (DOCS / "custom-loss.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(
    "snippet", blocks(ALGORITHMS, "yaml"), ids=lambda s: (re.findall(r"name: (\w+)", s) or [s.split(":")[0]])[-1]
)
def test_every_snippet_makes_a_loss_that_works(snippet: str) -> None:
    config = load_config(yaml.safe_load(snippet))
    loss_fn = build_loss(config)
    assert isinstance(loss_fn, LOSSES[config.loss.name])
    assert loss_fn.beta == config.grpo.beta
    rows = random_rows()
    loss, _ = loss_fn.from_logprobs(rows.logprobs, rows.entropy, rows.batch(), rows.totals)
    loss.backward()
    assert torch.isfinite(rows.logprobs.grad).all()


def test_the_table_names_every_loss_and_the_snippets_use_each() -> None:
    names = choices(key_fields()["loss.name"].annotation)
    assert re.findall(r"^\| `(\w+)`.*?\|.*\|.*\|.*\|$", ALGORITHMS.split("## Snippets")[0], re.MULTILINE) == names
    used = set(re.findall(r"name: (\w+)", " ".join(blocks(ALGORITHMS, "yaml"))))
    assert used == {*LOSSES, *CORRECTIONS}
    assert set(names) == {*LOSSES, "custom"}


def test_the_table_has_the_defaults_of_agg_type() -> None:
    rows = re.findall(r"^\| `(\w+)`[^|]*\|.*\| `(\w+)` \|[^|]*\|$", ALGORITHMS, re.MULTILINE)
    assert len(rows) == len(LOSSES)
    for name, agg_type in rows:
        assert load_config({"loss": {"name": name}}).loss.agg_type == agg_type


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The tutorial's file in the working directory, and its configurations."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loss.py").write_text("\n\n".join(blocks(CUSTOM, "python")))
    return [yaml.safe_load(snippet) for snippet in blocks(CUSTOM, "yaml")]


def test_the_tutorial_s_loss_is_called_with_the_six_tensors(tutorial: list[dict], tmp_path: Path) -> None:
    config = load_config(tutorial[0])
    assert config.loss.path == f"{tmp_path}/my_loss.py:CustomLoss"
    loss_fn = build_loss(config)
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=g, requires_grad=True)
    ids, mask = torch.randint(0, 5, (2, 3), generator=g), torch.tensor([[1.0, 1, 0], [0, 1, 1]])
    old = torch.log_softmax(logits.detach(), -1).gather(-1, ids[..., None])[..., 0] - 0.1
    advantages = torch.randn(2, 3, generator=g)
    loss, metrics = loss_fn(logits, ids, advantages, old, mask, None)
    expected = ((-math.exp(0.1) * advantages + 0.02 * 0.5 * 0.01) * mask).sum() / 4
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert metrics["kl_to_sampler"].item() == pytest.approx(0.005, abs=1e-6)


def test_the_tutorial_s_second_loss_is_on_the_fast_path(tutorial: list[dict]) -> None:
    check_loss(load_config(tutorial[1]))
    loss_fn = build_loss(load_config(tutorial[1]))
    assert isinstance(loss_fn, PolicyLoss)
    rows = random_rows()
    loss, _ = loss_fn.from_logprobs(rows.logprobs, rows.entropy, rows.batch(), rows.totals)
    ratio = (rows.logprobs - rows.generator).exp()
    expected = -((ratio - 1).tanh() * rows.advantages * rows.mask).sum() / rows.mask.sum()
    assert loss.item() == pytest.approx(expected.item())


def test_the_file_of_a_custom_loss_is_part_of_the_code_of_a_run(tutorial: list[dict], tmp_path: Path) -> None:
    config = load_config(tutorial[0])
    before = code_digests(config)
    with (tmp_path / "my_loss.py").open("a") as file:
        file.write("# changed\n")
    after = code_digests(config)
    assert [key for key in before if before[key] != after[key]] == [f"loss {tmp_path}/my_loss.py:CustomLoss"]


def test_a_function_is_a_loss_too_and_gets_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(
        "def loss(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs, scale):\n"
        "    return logits.sum() * scale, {}\n"
    )
    config = load_config({"loss": {"name": "custom", "path": "plain.py:loss", "options": {"scale": 3.0}}})
    value, metrics = build_loss(config)(torch.ones(1, 1, 2), *[torch.zeros(1, 1)] * 5)
    assert (value.item(), metrics) == (6.0, {})


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("logits.sum()", r"returned a tensor of shape \(\)"),
        ("logits, {}", r"returned \(a tensor of shape \(1, 1, 2\), a dict\)"),
        ("logits.sum(), 0.5", r"returned \(a tensor of shape \(\), a float\)"),
        ("0.5, {}", r"returned \(a float, a dict\)"),
        ("None", "returned None"),
    ],
)
def test_a_loss_that_returns_no_pair_is_named_with_what_it_must_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(
        "def loss(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs):\n"
        f"    return {returned}\n"
    )
    config = load_config({"loss": {"name": "custom", "path": "plain.py:loss"}})
    with pytest.raises(ConfigError, match=rf"loss\.path: .*plain\.py:loss {said}; it must return \(loss, metrics\)"):
        build_loss(config)(torch.ones(1, 1, 2), *[torch.zeros(1, 1)] * 5)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("nowhere.py:Loss", {}, "loss.path: nowhere.py:Loss: no such file"),
        ("bad.py:Missing", {}, "loss.path: bad.py:Missing: bad.py has no 'Missing'; it has Few, Fussy, Typed"),
        ("bad.py:Few", {}, "loss.path: bad.py:Few cannot be called as (logits, target_ids, advantages"),
        ("bad.py:Typed", {"clip": "x"}, "loss.options: of bad.py:Typed: clip is of type str, and declared as float"),
        ("bad.py:Fussy", {"a": 1}, "loss.options: making bad.py:Fussy with {'a': 1} failed: ValueError: not 1"),
    ],
)
def test_a_custom_loss_that_cannot_be_used_says_why(
    path: str, options: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(
        "class Few:\n    def __call__(self, logits, targets): ...\n"
        "class Fussy:\n    def __init__(self, a): raise ValueError(f'not {a}')\n"
        "class Typed:\n    def __init__(self, clip: float): ...\n"
    )
    config = load_config({"loss": {"name": "custom", "path": path, "options": options}})
    with pytest.raises(ConfigError) as caught:
        build_loss(config)
    assert message in str(caught.value).replace(f"{tmp_path}/", "")


PLAIN = {
    "logits.sum()": r"returned a tensor of shape \(\); it must return \(loss, metrics\)",
    "logits.sum(-1), {}": r"returned \(a tensor of shape \(2, 3\), a dict\); it must",
    "logits.detach().sum(), {}": r"returned a loss that does not depend on the logits \(it has no gradient\); it must",
    "logits.sum(), {'said': 'hello'}": "returned a str as the metric 'said'; it must",
    "logits.sum(), {'each': logits}": r"returned a tensor of shape \(2, 3, 4\) as the metric 'each'; it must",
    "logits.sum(), {3: 1.0}": "returned a metric whose name is 3; it must",
}


@pytest.mark.parametrize("returned", PLAIN)
def test_what_an_ordinary_function_returns_is_checked(returned: str) -> None:
    function = eval(f"lambda logits, *others: ({returned})")
    logits = torch.zeros(2, 3, 4, requires_grad=True)
    with pytest.raises(ConfigError, match=rf"loss\.path: mine\.py:f {PLAIN[returned]}"):
        CustomLoss(function, "mine.py:f")(logits, *[torch.zeros(2, 3)] * 5)


def test_what_an_ordinary_function_may_return() -> None:
    logits = torch.ones(2, 3, 4, requires_grad=True)
    loss, metrics = CustomLoss(lambda logits, *_: (logits.sum(), {"a": np.float32(1), "b": logits.mean()}), "f")(logits)
    assert (loss.item(), metrics["a"], metrics["b"].item()) == (24.0, 1, 1.0)
    with torch.no_grad():
        CustomLoss(lambda logits, *_: (logits.sum(), {}), "f")(logits.detach())


def test_what_an_ordinary_function_raises_names_it() -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("oops")

    with pytest.raises(RuntimeError, match="oops") as caught:
        CustomLoss(failing, "mine.py:f")(torch.zeros(1))
    assert caught.value.__notes__ == ["raised by the loss mine.py:f (loss.path)"]


RETURNING = {
    "-tokens.logprobs.exp() * tokens.advantages": r"returned a tensor of shape \(2, 64\); it must return \(loss",
    "None": "returned None;",
    "tokens.logprobs.sum(), {}": r"returned \(a tensor of shape \(\), a dict\);",
    "tokens.logprobs, None": r"returned \(a tensor of shape \(2, 64\), None\);",
    "tokens.logprobs.detach(), {}": r"returned a loss that does not depend on tokens\.logprobs \(it has no gradient\);",
    "tokens.logprobs, {'ratio': 1.0}": "returned a float as the metric 'ratio';",
    "tokens.logprobs @ tokens.logprobs, {}": r"^loss\.path: \S+ Mine failed on a small batch .*RuntimeError: ",
    "tokens.log_probs, {}": "failed on a small batch .*AttributeError: 'Tokens' object has no attribute 'log_probs'",
}


@pytest.mark.parametrize("returned", RETURNING)
def test_a_formula_that_returns_something_else_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from forge_core.algorithms.losses import PolicyLoss\n\n\n"
        "class Mine(PolicyLoss):\n"
        "    def __init__(self):\n        super().__init__(beta=0.1, agg_type='token_mean')\n\n"
        f"    def policy_gradient(self, tokens):\n        return {returned}\n"
    )
    with pytest.raises(ConfigError, match=RETURNING[returned]) as caught:
        check_run(load_config({**TINY, "loss": {"name": "custom", "path": "mine.py:Mine"}}))
    assert "loss.path: " in str(caught.value)
    assert "mine.py:Mine: Mine" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", r"Mine failed on a small batch .* does its __init__ call super\(\)\.__init__\?"),
        ("super().__init__(beta=0.0, agg_type='token_mean')", r"Mine has no policy_gradient\(self, tokens\)"),
    ],
)
def test_a_class_that_is_not_whole_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    formula = "    def policy_gradient(self, tokens):\n        return tokens.logprobs, {}\n" if body == "pass" else ""
    (tmp_path / "mine.py").write_text(
        "from forge_core.algorithms.losses import PolicyLoss\n\n\n"
        f"class Mine(PolicyLoss):\n    def __init__(self):\n        {body}\n\n{formula}"
    )
    with pytest.raises(ConfigError, match=said):
        check_loss(load_config({"loss": {"name": "custom", "path": "mine.py:Mine"}}))


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_every_built_in_formula_would_pass_as_one_of_a_user(name: str) -> None:
    probe(EVERY_LOSS[name](), "mine.py:Mine")


def test_clips_that_are_left_out_are_those_of_grpo_where_they_mean_the_same() -> None:
    made = {
        name: build_loss(load_config({"grpo": {"clip_low": 0.1, "clip_high": 0.3}, "loss": {"name": name}}))
        for name in LOSSES
    }
    assert {n for n, m in made.items() if (getattr(m, "clip_low", 0), getattr(m, "clip_high", 0)) == (0.1, 0.3)} == {
        "grpo",
        "dapo",
        "rloo",
    }
    own = build_loss(load_config({"loss": {"name": "dapo", "clip_low": 0.15}}))
    assert (own.clip_low, own.clip_high) == (0.15, 0.28)


def test_what_can_never_be_meant_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"loss\.adaptive_kl is true.*grpo\.beta above 0"):
        load_config({"grpo": {"beta": 0}, "loss": {"name": "dapo", "adaptive_kl": True}})
    with pytest.raises(ConfigError, match=r"low 2\.0 is not below high 1\.5"):
        load_config({"loss": {"correction": {"name": "icepop", "low": 2.0, "high": 1.5}}})


def test_the_old_form_of_the_section_still_loads() -> None:
    config = load_config({"loss": {"name": "grpo", "agg_type": "fixed_horizon"}, "training": {"entropy_coef": 0.01}})
    loss_fn = build_loss(config)
    assert (loss_fn.agg_type, loss_fn.entropy_coef, loss_fn.beta) == ("fixed_horizon", 0.01, 0.1)
    assert loss_fn(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), *[torch.zeros(1, 2)] * 4)[0].isfinite()
