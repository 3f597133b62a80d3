"""``make setup TORCH=rocm``, as far as a machine without such a GPU can tell: what it would run, what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.test_manifests import PROJECT, ROOT

INDEX = "TORCH_INDEX=https://index.example/whl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A source tree in which nothing was set up."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "constraints", tmp_path / "constraints")
    return tmp_path


def dry_run(folder: Path, *variables: str) -> subprocess.CompletedProcess[str]:
    ours = ("TORCH", "TORCH_INDEX", "ROCM_VERSION", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of the make that runs tests
    clean = {k: v for k, v in os.environ.items() if k not in ours}
    return subprocess.run(["make", "-n", "setup", *variables], cwd=folder, env=clean, capture_output=True, text=True)


def test_torch_comes_from_the_index_of_that_rocm_and_everything_else_has_its_pin(folder: Path):
    done = dry_run(folder, "TORCH=rocm", INDEX, "ROCM_VERSION=7.0", "PYTORCH_ROCM_ARCH=gfx942")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    index = "https://index.example/whl/rocm7.0"
    (torch,) = [line for line in lines if "--index-url" in line and "--no-deps" in line]
    (wanted,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch"]
    requirement = Requirement(torch.split("'")[1])
    assert (requirement.name, requirement.specifier) == ("torch", wanted.specifier)
    assert f"--index-url {index} " in torch
    (forge,) = [line for line in lines if "--editable" in line]
    assert f"--constraint .venv/constraints-rocm.txt --extra-index-url {index} " in forge
    assert "sed '/^torch==/d' constraints/cpu.txt > .venv/constraints-rocm.txt" in lines
    assert lines[-2].endswith("scripts/check_rocm.py")
    assert "vllm" not in done.stdout


def test_an_index_that_names_the_version_is_taken_as_it_is(folder: Path):
    done = dry_run(folder, "TORCH=rocm", f"{INDEX}/nightly/rocm7.1")
    assert "--index-url https://index.example/whl/nightly/rocm7.1 " in done.stdout


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (["TORCH=rocm"], "TORCH=rocm needs TORCH_INDEX"),
        (["TORCH=rocm", INDEX, "ROCM_VERSION="], "TORCH=rocm needs ROCM_VERSION"),
        (["TORCH=xpu"], "TORCH is xpu: use TORCH=cpu or TORCH=rocm"),
    ],
)
def test_what_is_missing_is_named(folder: Path, variables: list[str], said: str):
    done = dry_run(folder, *variables)
    assert done.returncode != 0
    assert said in done.stderr


def test_without_torch_rocm_the_cpu_set_up_is_as_it_was(folder: Path):
    done = dry_run(folder, INDEX)
    assert "--constraint constraints/cpu.txt --no-deps --extra-index-url https://index.example/whl torch" in done.stdout
    assert "scripts/install_vllm_cpu.sh" in done.stdout
    assert "rocm" not in done.stdout


def test_a_torch_that_is_no_build_for_rocm_is_refused_after_the_installation():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "check_rocm.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "is no build for ROCm: check TORCH_INDEX" in done.stderr
