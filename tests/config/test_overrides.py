"""Overrides from the command line and from a flow's parameters."""

from __future__ import annotations

import pytest

from forge_core.config import ConfigError, load_config


def test_values_are_yaml_and_later_ones_win():
    config = load_config(
        {"grpo": {"beta": 0.5}},
        [
            "grpo.beta=0.2",
            "grpo.beta=1e-3",
            "dataset.path=data.jsonl",
            "dataset.options={a: [1, 2], b: x=y}",
            "rewards.functions=[{path: a}, {path: b, weight: 2}]",
            "rewards.functions.1.weight=0.5",
            "store=s3://b/p?x=1=2",
            "eval.split=None",
            "training.betas=[0.8, 0.9]",
        ],
    )
    assert config.grpo.beta == 1e-3
    assert config.dataset.options == {"a": [1, 2], "b": "x=y"}
    assert [f.weight for f in config.rewards.functions] == [1.0, 0.5]
    assert config.store == "s3://b/p?x=1=2"
    assert config.eval.split is None
    assert config.training.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    "text", ["010", "123", "true", "1e5", "Question: {prompt}", "{prompt}", "a #b", "[1", "it's", "@a"]
)
def test_a_text_key_takes_the_value_as_typed(text):
    assert load_config({"dataset": {"path": "p"}}, [f"dataset.prompt_template={text}"]).dataset.prompt_template == text


def test_quotes_around_a_text_are_taken_off():
    assert load_config({}, ["run.id='7'"]).run.id == "7"
    assert load_config({}, ['eval.split="null"']).eval.split == "null"
    with pytest.raises(ConfigError, match=r"run\.id: the value .* is no YAML .*: put it in quotes"):
        load_config({}, ["run.id='7"])


def test_a_mapping_of_overrides_holds_typed_values():
    config = load_config(
        {"steps": 3, "grpo": {"beta": 0.3}}, {"training.betas": [0.1, 0.2], "run.id": "x", "~grpo.beta": None}
    )
    assert (config.training.betas, config.run.id, config.grpo.beta) == ((0.1, 0.2), "x", 0.1)


def test_removing_a_key_brings_back_its_default():
    assert load_config({"steps": 3, "grpo": {"beta": 0.3}}, ["~steps", "~grpo"]) == load_config({})
    config = load_config({"rewards": {"functions": [{"path": "a"}, {"path": "b"}]}}, ["~rewards.functions.0"])
    assert [f.path for f in config.rewards.functions] == ["b"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("~grpo.beta", "~grpo.beta: the configuration does not set this key, so there is nothing to remove"),
        ("~grpo.btea", "~grpo.btea: there is no such key to remove: did you mean ~grpo.beta?"),
        ("foo", "foo: is no override: write key=value"),
        ("=3", "=3: is no override"),
        ("steps=[1", "steps: the value '[1' is no YAML"),
        ("dataset.options={a: 1, a: 2}", "dataset.options.a: given twice"),
        ("steps.x=3", "steps.x: cannot be set below steps, which is 5"),
        ("rewards.functions.0.path=a", "rewards.functions='[...]'"),
        ("stepz=3", "stepz: unknown key: did you mean steps?"),
    ],
)
def test_an_override_that_cannot_apply_says_so(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config({"steps": 5}, [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["--trainer.procs", "4"], ["--trainer.procs 4: keys are set without dashes: type services.trainer.procs=4"]),
        (["--trainer.procs=4"], ["type services.trainer.procs=4"]),
        (["--steps", "4"], ["type steps=4"]),
        (["--group-size", "4"], ["type grpo.n_samples=4"]),
        (["--nothing-like-it", "4"], ["no key is called nothing_like_it"]),
        # as argparse hands them over: values first, flags behind
        (
            ["4", "2", "--trainer.procs", "--generator.procs"],
            ["services.trainer.procs=4", "services.generator.procs=2"],
        ),
    ],
)
def test_a_flag_is_answered_with_the_override_to_type(words, answers):
    with pytest.raises(ConfigError) as caught:
        load_config({}, ["run.seed=1", *words])
    assert len(caught.value.problems) == len(answers)
    for problem, answer in zip(caught.value.problems, answers, strict=True):
        assert answer in problem


def test_one_text_instead_of_a_list_is_a_programming_error():
    with pytest.raises(TypeError, match="list"):
        load_config({}, "steps=3")
