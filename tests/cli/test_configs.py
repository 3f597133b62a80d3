"""Every file in ``configs/`` loads, and passes the gate of a run as far as a machine without hub and GPU can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.config import ConfigError, RunConfig, config_warnings, load_config, validate_for_training
from forge_core.data.prompts import check_dataset
from forge_core.devices import alone
from forge_core.rewards.actor import RewardActor
from forge_core.runs.checks import check_run

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("retrain_", "sft_")  # tests/retraining/test_settings.py and tests/sft/test_configs.py load those
FILES = sorted(f for f in (ROOT / "configs").glob("*.yaml") if not f.name.startswith(OTHERS))
GPUS = 8
ROLES = ("generator", "trainer", "reference")
IN_ROLES = ("grpo_qwen3_32b.yaml",)  # each role on a machine of its own
# What a file needs besides itself, as its header says.
ADDITIONS = {"guide_grpo_math.yaml": ["rewards.functions=[{path: last_integer}]"]}


def shipped(file: Path) -> RunConfig:
    return load_config(file, ADDITIONS.get(file.name, []))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_it_passes_the_gate_of_a_run_without_a_warning(file: Path):
    config = shipped(file)
    if file.name in IN_ROLES:
        for role in ROLES:
            validate_for_training(alone(config, role), gpus=GPUS)
    else:
        assert validate_for_training(config, gpus=GPUS) == []
    assert config_warnings(config) == []
    RewardActor.from_config(config.rewards).close()


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_its_header_names_it_and_every_addition_it_needs(file: Path):
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    commands = " ".join(header)
    assert f"forge {'create' if file.name in IN_ROLES else 'train'} configs/{file.name}" in commands
    for addition in ADDITIONS.get(file.name, []):
        key, _, value = addition.partition("=")
        assert f"{key}='{value}'" in commands


def test_the_quickstart_can_start_anywhere():
    assert check_run(load_config(ROOT / "configs" / "quickstart.yaml")) == []


def test_the_data_of_smollm2_chain_sum_are_its_own_tasks():
    config = load_config(ROOT / "configs" / "smollm2_chain_sum.yaml")
    assert config.dataset is not None
    check_dataset(config.dataset)
    assert config.rewards.functions[0].path == "reasoning_gym"


def test_smollm2_chain_sum_without_its_model_says_which_folder_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\./smollm2-135m-instruct.*no such folder"):
        check_run(load_config(ROOT / "configs" / "smollm2_chain_sum.yaml"))


def test_the_guides_file_cannot_train_without_a_reward_and_says_so():
    with pytest.raises(ConfigError, match=r"rewards\.functions: is empty"):
        validate_for_training(load_config(ROOT / "configs" / "guide_grpo_math.yaml"), gpus=GPUS)
