"""The sections of built-in rewards and the classes behind them: the same names, arguments and defaults."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest

from forge_core.config import ConfigError, load_config, to_yaml
from forge_core.config.reward_sections import BuiltinReward, EnsembleSection, RewardSection
from forge_core.rewards import BUILTINS, resolve
from forge_core.rewards.identity import reward_identity

COMMON = {"name", "weight", "timeout_s"}
SECTIONS = [get_args(one)[0] for one in get_args(get_args(RewardSection)[0])]
BUILTIN = {get_args(s.model_fields["name"].annotation)[0]: s for s in SECTIONS if issubclass(s, BuiltinReward)}


def test_every_built_in_reward_has_a_section():
    assert BUILTIN.keys() == BUILTINS.keys()


@pytest.mark.parametrize("name", BUILTINS)
def test_the_settings_of_a_section_are_the_arguments_of_its_class(name: str):
    arguments = inspect.signature(resolve(name)).parameters
    defaults = {k: None if p.default is p.empty else p.default for k, p in arguments.items() if k not in COMMON}
    fields = {k: f for k, f in BUILTIN[name].model_fields.items() if k not in COMMON}
    assert fields.keys() == defaults.keys()
    for key, field in fields.items():
        assert field.is_required() == (arguments[key].default is inspect.Parameter.empty), key
        if not field.is_required():
            assert _plain(field.default) == _plain(defaults[key]), key


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value


def test_three_ways_to_name_a_reward_are_valid_and_come_back_as_they_were(tmp_path):
    functions = [
        {"path": "exact_match", "options": {"require_eos": True}},
        {"name": "math", "take": "first", "weight": 0.5, "timeout_s": 5},
        {"path": "my_module:grade"},
    ]
    config = load_config({"rewards": {"functions": functions}})
    assert [(f.path, f.options, f.weight, f.timeout_s) for f in config.rewards.functions] == [
        ("exact_match", {"require_eos": True}, 1.0, None),
        ("math", {"take": "first"}, 0.5, 5.0),
        ("my_module:grade", {}, 1.0, None),
    ]
    (tmp_path / "written.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "written.yaml") == config
    assert load_config(config, ["rewards.functions.1.take=last"]).rewards.functions[1].options == {}


def test_a_named_reward_and_the_same_by_path_are_the_same():
    named, by_path = (
        load_config({"rewards": {"functions": [one]}}).rewards.functions
        for one in ({"name": "math", "take": "first"}, {"path": "math", "options": {"take": "first"}})
    )
    assert reward_identity(named) == reward_identity(by_path)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            {"name": "maths"},
            "rewards.functions.0.name: is 'maths': must be one of custom, exact_match.*did you mean math",
        ),
        ({"name": "math", "tags": ["a"]}, "rewards.functions.0.name=math has no key tags: remove it, or set .*=format"),
        ({"name": "math", "take": "middle"}, "rewards.functions.0.take: is 'middle': must be one of last, first"),
        ({"name": "overlong", "buffer": 3}, "rewards.functions.0.max_tokens: is missing"),
        ({"name": "math", "options": {"take": "first"}}, "has no key options"),
        ({"weight": 2}, "rewards.functions.0.path: is missing"),
        ({"name": "math", "timeout_s": 0}, "rewards.functions.0.timeout_s: is 0: must be a number, above 0"),
    ],
)
def test_a_mistake_is_answered_with_what_would_be_right(function: dict, text: str):
    with pytest.raises(ConfigError, match=text.replace(".0.", r"\.0\.")):
        load_config({"rewards": {"functions": [function]}})


def test_what_decides_no_grade_is_not_part_of_the_identity():
    judge = {"name": "llm_judge", "base_url": "http://127.0.0.1:1/v1", "model": "m"}

    def identity(**changes: Any) -> list[dict]:
        return reward_identity(load_config({"rewards": {"functions": [{**judge, **changes}]}}).rewards.functions)

    for same in ({"concurrency": 2}, {"retries": 0}, {"cost_per_million": [1, 2]}, {"cache": "x"}, {"timeout_s": 3}):
        assert identity(**same) == identity()
    for other in ({"model": "n"}, {"rubric": "x"}, {"temperature": 1}, {"max_score": 5}, {"weight": 2}):
        assert identity(**other) != identity()


def test_an_ensemble_is_known_by_its_verifiers():
    def identity(take: str) -> list[dict]:
        verifiers = [{"name": "thinking"}, {"name": "f1"}, {"name": "math", "take": take}]
        return reward_identity([EnsembleSection(name="ensemble", verifiers=verifiers)])

    assert identity("first") != identity("last")
    assert [v["name"] for v in identity("last")[0]["verifiers"]] == ["thinking", "f1", "math"]
