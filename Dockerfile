# An image of Forge on a CPU, for workers of any role, the coordinator and the Prefect server (docs/kubernetes.md).
# Nothing of yours is in it but this checkout: credentials come from the environment when it runs.
#
#     docker build --tag forge .
#
# GPUs: build with --build-arg EXTRAS=vllm --build-arg CONSTRAINTS= (vLLM pins its own torch; docs/gpus.md).
FROM python:3.12.11-slim-bookworm AS build

ARG EXTRAS=examples
ARG CONSTRAINTS=constraints/cpu.txt
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /build
# Dependencies first: this layer stays as it is while only code changes.
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
RUN mkdir forge_core tasks flows \
    && /opt/venv/bin/pip install ${CONSTRAINTS:+--constraint "$CONSTRAINTS"} ".[$EXTRAS]" \
    && /opt/venv/bin/pip uninstall --yes forge-rl

FROM python:3.12.11-slim-bookworm

# What the sandbox of the reward `code` is made with (docs/sandbox.md).
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home forge
COPY --from=build /opt/venv /opt/venv
# The checkout is the folder that deployments run in: see `pull` in prefect.yaml.
WORKDIR /opt/forge
COPY pyproject.toml README.md LICENSE prefect.yaml ./
COPY configs configs
COPY forge_core forge_core
COPY tasks tasks
COPY flows flows
RUN /opt/venv/bin/pip install --no-cache-dir --no-deps --editable .
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 FORGE_HOME=/home/forge/.forge \
    PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1
USER 10001:10001
CMD ["forge", "doctor"]
