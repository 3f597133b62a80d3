"""Every message names the key, what is wrong, and what would be right."""

from __future__ import annotations

import pytest

from forge_core.config import ConfigError, load_config
from forge_core.config.hints import OLD_NAMES
from forge_core.config.keys import key_fields, kinds_with


def problems(source: dict, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"training": {"batch_sise": 4}}, "training.batch_sise: unknown key: did you mean training.batch_size?"),
        ({"training": {"steps": 4}}, "training.steps: unknown key: did you mean steps?"),
        ({"group_size": 4}, "group_size: unknown key: did you mean grpo.n_samples?"),
        ({"off_by_n": 1}, "off_by_n: unknown key: did you mean max_staleness?"),
        ({"training": {"local_batch_size": 4}}, "did you mean training.batch_size?"),
        (
            {"trainer": {"optimizer": {"lr": 1}}},
            "trainer.optimizer.lr: unknown key: did you mean training.learning_rate?",
        ),
        ({"trainer": {"procs": 1}}, "trainer: unknown key: did you mean services.trainer?"),
        ({"trainning": {"batch_size": 1}}, "trainning: unknown key: did you mean training?"),
        (
            {"policy": {"sampling_params": {"n": 1}}},
            "policy.sampling_params.n: unknown key: did you mean grpo.n_samples?",
        ),
        ({"services": {"policy": {"procs": 1}}}, "services.policy: unknown key: did you mean services.generator?"),
        ({"clip_high": 1}, "clip_high: unknown key: did you mean grpo.clip_high?"),
        ({"rewards": {"functions": [{"path": "a", "wieght": 1}]}}, "did you mean rewards.functions.0.weight?"),
        ({"model": {"vocabulary": "ab", "layers": 1}}, "model.layers: unknown key"),
        ({"grpo": {"xyzzy": 1}}, "the keys below grpo are n_samples, clip_low, clip_high, beta, temperature"),
        ({"grpo.beta": 1}, "grpo.beta: dotted keys are for overrides: in a file write beta below grpo:"),
    ],
)
def test_an_unknown_key_is_answered_with_the_likeliest_one(source, message):
    assert message in "\n".join(problems(source))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"steps": 0}, "steps: is 0: must be a whole number, at least 1"),
        ({"steps": "many"}, "steps: is 'many': must be a whole number, at least 1"),
        ({"steps": 2.5}, "steps: is 2.5: must be a whole number, at least 1"),
        ({"steps": None}, "steps: is null: must be a whole number, at least 1"),
        ({"steps": True}, "steps: is true: true and false are not numbers: must be a whole number, at least 1"),
        ({"training": {"learning_rate": 0}}, "training.learning_rate: is 0: must be a number, above 0"),
        ({"training": {"learning_rate": float("inf")}}, "training.learning_rate: is .inf: must be a number"),
        (
            {"training": {"betas": [0.9, 2]}},
            "training.betas: holds 2: must be a list of 2, each a number, at least 0, below 1",
        ),
        (
            {"training": {"dtype": "bf16"}},
            "training.dtype: is 'bf16': must be one of float32, bfloat16; did you mean bfloat16?",
        ),
        ({"weights": {"dtype": "bflot16"}}, "must be one of float32, bfloat16, or null; did you mean bfloat16?"),
        ({"grpo": 3}, "grpo: is 3: must be a section with the keys n_samples, "),
        ({"grpo": None}, "grpo: is null: must be a section"),
        ({"dataset": {"split": "test"}}, "dataset.path: is missing: must be text (Where prompts come from"),
        ({"dataset": {"path": 3}}, 'dataset.path: is 3: must be text; write it in quotes: "3"'),
        ({"dataset": {"path": "x", "streaming": "maybe"}}, "dataset.streaming: is 'maybe': must be true or false"),
        ({"model": 3}, "model: is 3: must be text, or a section with the keys architecture, vocabulary"),
        ({"model": {"hidden_size": 3}}, "model.vocabulary: is missing"),
        (
            {"rewards": {"functions": ["a"]}},
            "rewards.functions: holds 'a': must be a list, each a section with a name, one of custom, exact_match,",
        ),
        (
            {"run": {"id": "a/b"}},
            "run.id: is 'a/b': must be text, or null (Name of the run in the store: up to 100 letters",
        ),
        ({"run": {"seed": 2**32}}, "run.seed: is 4294967296: must be a whole number, at least 0, below 4294967296"),
        ({"checkpoint": {"keep": 1}}, "checkpoint.keep: is 1: must be a whole number, at least 2"),
    ],
)
def test_a_wrong_value_is_answered_with_what_would_be_right(source, message):
    found = problems(source)
    assert len(found) == 1
    assert message in found[0]


def test_a_penalty_without_a_reference_says_how_to_mend_it():
    found = problems({"services": {"ref_model": None}})
    assert "grpo.beta is 0.1" in found[0]
    assert "set grpo.beta=0, or leave services.ref_model out" in found[0]
    assert load_config({"services": {"ref_model": None}}, ["grpo.beta=0"]).services.ref_model is None


def test_all_problems_come_at_once(monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    found = problems(
        {"stepz": 1, "run": {"seed": -1}, "store": "${oc.env:NOT_SET}", "model": "hf://"}, "--x", "~eval", "a"
    )
    keys = [problem.split(":")[0] for problem in found]
    assert sorted(keys) == ["--x a", "model", "run.seed", "stepz", "store", "~eval"]


def test_the_message_counts_the_problems_and_names_the_source():
    with pytest.raises(ConfigError) as caught:
        load_config({"a_a": 1, "b_b": 2})
    assert str(caught.value).splitlines()[0] == "configuration: 2 problems"
    assert str(ConfigError("one: message")) == "one: message"


@pytest.mark.parametrize("key", [k for k, f in key_fields().items() if "*" not in k and str(f.annotation) != "Any"])
def test_no_key_takes_a_value_of_no_type_without_a_plain_answer(key):
    kind = _kind(key)
    found = problems(kind, f"{key}=[[[]]]") if not _takes_text(key) else problems_of_mapping(kind, key)
    assert any(p.startswith(f"{key}: ") and "must be" in p for p in found), found


def problems_of_mapping(source: dict, key: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, {key: [[[]]]})
    return caught.value.problems


def _kind(key: str) -> dict:
    """A configuration in which ``key`` may be set: its section, where that is one of several, by name."""
    section, _, leaf = key.rpartition(".")
    tree: dict = {} if leaf == "name" else {"name": (kinds_with(key) or [None])[0]}
    if tree.get("name") is None:
        return {}
    for part in reversed(section.split(".")):
        tree = {part: tree}
    return tree


def _takes_text(key: str) -> bool:
    return "str" in str(key_fields()[key].annotation)


@pytest.mark.parametrize("target", sorted(set(OLD_NAMES.values())))
def test_every_renamed_key_leads_to_a_key_that_exists(target):
    assert target in key_fields()


def test_no_renamed_key_hides_a_key_of_ours():
    assert not set(OLD_NAMES) & set(key_fields())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "dapo2"}, "loss.name: is 'dapo2': must be one of grpo, dapo"),
        ({"name": "dapo2"}, "did you mean dapo?"),
        ({"tau_pos": 1}, "loss.tau_pos: loss.name=grpo has no key tau_pos: remove it, or set loss.name=sapo"),
        ({"name": "gspo", "variant": "x"}, "loss.variant: is 'x': must be one of token, sequence"),
        ({"clip_lwo": 1}, "loss.clip_lwo: unknown key: did you mean loss.clip_low?"),
        ({"beta": 1}, "loss.beta: unknown key: did you mean grpo.beta?"),
        ({"name": "custom"}, "loss.path: is missing: must be text"),
        ("grpo", "loss: is 'grpo': must be a section with a name, one of grpo, dapo"),
        ({"correction": {"name": "tis"}}, "loss.correction.name: is 'tis': must be one of truncated, icepop"),
        ({"correction": {"low": 0.5}}, "loss.correction.name: is missing: must be one of truncated, icepop"),
    ],
)
def test_a_section_that_is_one_of_several_is_told_apart_by_its_name(loss, message):
    found = problems({"loss": loss})
    assert len(found) == 1
    assert message in found[0]


def test_a_section_of_which_only_some_keys_are_ours_is_explained_key_by_key():
    old = {"trainer": {"training": {"seq_len": 64, "steps": 7, "gc_freq": 1}, "optimizer": {"lr": 1e-5}}}
    with pytest.raises(ConfigError) as caught:
        load_config(old)
    assert caught.value.problems == [
        "trainer.training.seq_len: unknown key: did you mean training.seq_len?",
        "trainer.training.steps: unknown key: did you mean steps?",
        "trainer.training.gc_freq: unknown key: there is none of this meaning: "
        "Python's garbage collector is left alone",
        "trainer.optimizer.lr: unknown key: did you mean training.learning_rate?",
    ]
