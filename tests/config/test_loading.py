"""Files, mappings and configurations become a RunConfig, and go back to YAML without loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.config import ConfigError, RunConfig, config_digest, diff, load_config, store_uri, to_yaml
from forge_core.config.sft_loader import load_sft_config

ROOT = Path(__file__).resolve().parents[2]
GUIDE = """
model: "Qwen/Qwen2.5-7B-Instruct"
dataset: {path: "openai/gsm8k", split: "train", streaming: true}
training: {batch_size: 4, learning_rate: 1e-6, seq_len: 4096, dtype: bfloat16, gradient_accumulation_steps: 4}
grpo: {n_samples: 8, clip_low: 0.2, clip_high: 0.28, beta: 0.1, temperature: 0.7}
services:
  generator: {procs: 1, num_replicas: 1, with_gpus: true}
  trainer: {procs: 1, num_replicas: 1, with_gpus: true}
  ref_model: {procs: 1, num_replicas: 1, with_gpus: true}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_guides_yaml_loads_as_it_stands(write):
    config = load_config(write(GUIDE))
    assert config.model == "Qwen/Qwen2.5-7B-Instruct"
    assert (config.training.learning_rate, config.grpo.clip_high) == (1e-6, 0.28)
    assert (config.dataset.path, config.dataset.streaming) == ("openai/gsm8k", True)
    assert config.services.ref_model.with_gpus is True
    assert config.episodes_per_optimizer_step == 16
    assert config.groups_per_batch == 2


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["training.sync_interval=10"], lambda c: c.training.sync_interval, 10),
        (["training.entropy_coef=0.01"], lambda c: c.training.entropy_coef, 0.01),
        (["services.ref_model={with_gpus: false}"], lambda c: c.services.ref_model.with_gpus, False),
        (["~services.ref_model"], lambda c: c.services.ref_model.procs, 1),
        (["~services"], lambda c: c.services.trainer.with_gpus, None),
        (
            [
                "parallelism={tensor_parallel_degree: 2, pipeline_parallel_degree: 1, data_parallel_shard_degree: 2}",
                "services.trainer.procs=2",
            ],
            lambda c: (c.parallelism.tensor_parallel_degree, c.services.trainer.procs),
            (2, 2),
        ),
        (["model=hf://Qwen/Qwen3-1.7B"], lambda c: c.model, "hf://Qwen/Qwen3-1.7B"),
    ],
)
def test_the_guides_variants_load(write, overrides, key, expected):
    assert key(load_config(write(GUIDE), overrides)) == expected


def test_a_decay_rate_of_one_is_refused_with_its_key():
    for rates in ("[1.0, 0.95]", "[0.9, 1]", "[-0.1, 0.9]"):
        with pytest.raises(ConfigError, match=r"training\.betas"):
            load_config({}, [f"training.betas={rates}"])


@pytest.mark.parametrize(
    ("degrees", "data"),
    [
        ("", 8),
        (", tensor_parallel_degree: 2", 4),
        (", tensor_parallel_degree: 2, pipeline_parallel_degree: 2", 2),
        (", context_parallel_degree: 1, expert_parallel_degree: 1, data_parallel_replicate_degree: 1", 8),
    ],
)
def test_a_shard_degree_of_minus_one_is_what_the_other_degrees_leave_of_the_trainers_processes(degrees, data):
    overrides = ["services.trainer.procs=8", f"parallelism={{data_parallel_shard_degree: -1{degrees}}}"]
    config = load_config({}, overrides)
    assert config.parallelism.data_parallel_shard_degree == data
    assert load_config(yaml.safe_load(to_yaml(config))) == config
    assert load_config(config) == config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallelism.data_parallel_shard_degree=-1"], r"data_parallel_shard_degree: is -1, .*nothing says how many"),
        (
            ["parallelism={data_parallel_shard_degree: -1, tensor_parallel_degree: 3}", "services.trainer.procs=8"],
            r"data_parallel_shard_degree: is -1, .* = 3 leaves .*services\.trainer\.procs is 8.* to a multiple of 3",
        ),
        (["parallelism.data_parallel_shard_degree=0"], r"data_parallel_shard_degree: is 0: no rank would train"),
        (["parallelism.data_parallel_shard_degree=-2"], r"data_parallel_shard_degree: is -2: must be a whole number"),
        (["parallelism.context_parallel_degree=2"], r"parallelism\.context_parallel_degree: .* only 1 can be given"),
        (["parallelism.expert_parallel_degree=-1"], r"parallelism\.expert_parallel_degree: .* only 1 can be given"),
        (["parallelism.context_parallel_degree=true"], r"parallelism\.context_parallel_degree: .* only 1 can be given"),
    ],
)
def test_degrees_that_cannot_be_are_refused_with_their_key(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config({}, overrides)


def test_a_supervised_run_has_as_many_ranks_as_its_degrees_say():
    assert load_sft_config({}, ["parallelism.context_parallel_degree=1"]).parallelism.data_parallel_shard_degree == 1
    with pytest.raises(ConfigError, match=r"data_parallel_shard_degree: is -1, .*: set the degree to a number"):
        load_sft_config({}, ["parallelism.data_parallel_shard_degree=-1"])


RUNS = [p for p in sorted((ROOT / "configs").glob("*.yaml")) if not p.name.startswith(("retrain_", "sft_"))]


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.name)
def test_every_shipped_configuration_loads_and_survives_a_round_trip(path):
    config = load_config(path)
    assert load_config(yaml.safe_load(to_yaml(config))) == config


def test_defaults_apply_where_a_file_says_nothing():
    assert load_config({}) == RunConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n", "the file is not a mapping"),
        ("steps: [1\nmodel: x\n", "no valid YAML: line 2, column "),
        ("steps: 1\n\tmodel: x\n", "no valid YAML: line 2"),
        ("steps: 1\nmodel: a\nsteps: 2\n", "steps: given twice, in line 1 and line 3"),
        ("run:\n  id: a\n  id: b\n", "run.id: given twice, in line 2 and line 3"),
        ("rewards: {functions: [{path: a, path: b}]}\n", "rewards.functions.0.path: given twice"),
        ("1: x\n", "1: line 1: a key must be text"),
    ],
)
def test_a_file_that_says_nothing_clear_is_refused_with_its_line(write, text, message):
    with pytest.raises(ConfigError, match=r"run\.yaml") as caught:
        load_config(write(text))
    assert message in str(caught.value)


def test_a_missing_file_and_a_file_in_another_encoding_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*\n.*does not exist: give the path"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("store: \u00e9".encode("latin-1"))
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "latin.yaml")


def test_an_anchor_used_twice_is_two_sections_to_an_override(write):
    path = write("services:\n  generator: &one {procs: 1}\n  trainer: *one\n")
    services = load_config(path, ["services.trainer.procs=3"]).services
    assert (services.generator.procs, services.trainer.procs) == (1, 3)


def test_the_callers_mapping_is_left_alone():
    source = {"grpo": {"beta": 0.5}}
    load_config(source, ["grpo.beta=0.1"])
    assert source == {"grpo": {"beta": 0.5}}


def test_a_configuration_can_be_the_source_of_another():
    first = load_config({"model": r"a/\${b}"})
    assert first.model == "a/${b}"
    second = load_config(first, ["steps=7"])
    assert (second.model, second.steps) == ("a/${b}", 7)
    assert diff(first, second) == [("steps", 100, 7)]


@pytest.mark.parametrize("key", ["model", "dataset.path"])
def test_an_hf_name_without_a_repository_is_refused(key):
    with pytest.raises(ConfigError, match=f"{key}: Empty repository name: write hf://org/name"):
        load_config({}, [f"{key}=hf://"])


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="\ufeff"))
TRAPS = st.sampled_from(
    ["1e-6", "null", "None", "no", "2024-01-01", "010", "~", "1:30", "${x}", r"\\${", "a: b", " x "]
)


@settings(max_examples=30, deadline=None)
@given(
    text=st.one_of(TEXTS, TRAPS),
    rate=st.floats(1e-12, 1e3),
    options=st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(), st.booleans(), st.none()), max_size=3),
)
def test_to_yaml_loads_back_to_an_equal_configuration(tmp_path_factory, text, rate, options):
    config = RunConfig.model_validate(
        {
            "training": {"learning_rate": rate},
            "dataset": {"path": "x", "system_prompt": text},
            "rewards": {"functions": [{"path": "a", "options": options}]},
        }
    )
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    again = load_config(path)
    assert again == config
    assert config_digest(again) == config_digest(config)
    assert diff(again, config) == []


def test_the_digest_depends_on_content_only():
    one = load_config({"steps": 3, "grpo": {"beta": 0, "n_samples": 4}})
    same = load_config({"grpo": {"n_samples": 4}}, ["grpo.beta=0.0", "steps=3"])
    assert config_digest(one) == config_digest(same)
    assert config_digest(one) != config_digest(load_config(one, ["run.seed=1"]))


def test_diff_names_the_keys_that_differ_with_both_values():
    old = load_config({"model": "a/b", "grpo": {"beta": 0.1}, "rewards": {"functions": [{"path": "x"}]}})
    new = load_config(
        {"model": {"vocabulary": "ab"}, "grpo": {"beta": 0}, "dataset": {"path": "p", "options": {"n": 1}}},
        ["rewards.functions=[{path: x}]"],
    )
    changed = {key: (before, after) for key, before, after in diff(old, new)}
    assert set(changed) == {"model", "grpo.beta", "dataset"}
    assert changed["grpo.beta"] == (0.1, 0.0)
    assert changed["model"][0] == "a/b"
    assert changed["model"][1]["vocabulary"] == "ab"
    assert changed["dataset"][0] is None


def test_the_store_is_found_in_the_documented_order(monkeypatch):
    monkeypatch.delenv("FORGE_STORE", raising=False)
    configured = load_config({"store": "/of/the/config"})
    assert store_uri() == "./forge-store"
    assert store_uri(None, RunConfig()) == "./forge-store"
    monkeypatch.setenv("FORGE_STORE", "s3://from/environment")
    assert store_uri() == "s3://from/environment"
    assert store_uri(None, configured) == "/of/the/config"
    assert store_uri("memory://flag", configured) == "memory://flag"
    assert store_uri(None, load_config(configured, ["store=/of/the/override"])) == "/of/the/override"


def test_importing_the_configuration_imports_no_engine():
    script = "import forge_core.config, sys, json; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    modules = json.loads(
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout
    )
    assert not {"torch", "transformers", "torchtitan", "prefect", "numpy"} & set(modules)
