"""What a policy is evaluated on: held-out prompts, the requests that sample them, and the identity of the result.

Invariants:
- The same prompts, seeds and sampling whatever the policy, so that two policies are compared prompt by prompt.
- Held-out prompts are chosen by a hash of the prompt: no run with the same ``eval.holdout`` has trained on one.
- ``identity`` is known before the work and depends on nothing else: weights, token ids and seeds of the prompts,
  answers, sampling and rewards. Runs, versions, machines and times are provenance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from forge_core.config import RunConfig
from forge_core.data.identity import prompt_digest
from forge_core.data.prompts import Prompt, PromptSet, load_prompts, split_holdout
from forge_core.data_model import SCHEMA_VERSION, Completion, GenerationRequest, SamplingParams
from forge_core.generation.seeds import sample_seed
from forge_core.models.probe import PROBE
from forge_core.runs.episodes import episode_row
from forge_core.store import File, content_digest, digest

EVALUATION_BATCH = 2**31  # stands for "no batch" in seeds, outside every training step


def heldout_prompts(config: RunConfig, prompts: PromptSet) -> list[Prompt]:
    """The prompts of an evaluation: of ``eval.split``, or held out of the training set (``prompts``) by hash."""
    section, wanted = config.dataset, config.eval.prompts
    assert section is not None
    if config.eval.split:
        other = load_prompts(section.model_copy(update={"split": config.eval.split}), seed=config.run.seed, key="eval")
        return [other[i] for i in range(min(wanted, len(other)))]
    return [prompts[row] for row in split_holdout(prompts, config.eval.holdout)[1][:wanted]]


def suite_requests(
    config: RunConfig, prompts: Sequence[Prompt], encode: Callable[[Prompt], list[int]], name: str, version: int
) -> list[GenerationRequest]:
    """``eval.samples`` requests per prompt that fits; ids are ``<name>/<prompt>/<sample>``, numbers with 8 digits."""
    sampling = SamplingParams(config.eval.temperature, max_new_tokens=config.rollout.max_new_tokens)
    requests = []
    for i, prompt in enumerate(prompts):
        ids = tuple(encode(prompt))
        for sample in range(config.eval.samples if len(ids) <= config.max_prompt_tokens else 0):
            seed = sample_seed(config.run.seed, EVALUATION_BATCH, 0, i, sample)
            requests.append(GenerationRequest(f"{name}/{i:08d}/{sample:08d}", ids, seed, sampling, version, version))
    return requests


def policy_digest(files: Iterable[File]) -> str:
    """Digest of the files of a model, without the probe that some writers put beside them."""
    return content_digest({file.name: file.sha256 for file in files if file.name != PROBE})


def place_of(request_id: str) -> tuple[int, int]:
    """Prompt and sample of a request (or episode) of an evaluation."""
    prompt, sample = request_id.split("/")[-2:]
    return int(prompt), int(sample)


def identity(
    policy: str,
    requests: Sequence[GenerationRequest],
    prompts: Sequence[Prompt],
    functions: list[dict[str, Any]],
    environment: dict[str, Any],
) -> str:
    """Digest of all that decides an evaluation. ``policy``: the digest of the weights; ``functions``: the identity of
    the rewards; ``environment``: of the environment (empty: there is none)."""
    asked = sorted({place_of(r.request_id)[0] for r in requests})
    return digest(
        {
            "stage": "evaluation",
            "schema": SCHEMA_VERSION,
            "weights": policy,
            "requests": [(r.prompt_ids, r.seed, r.sampling.__dict__) for r in requests],
            "prompts": [(prompt_digest(prompts[i]), prompts[i].task) for i in asked],
            "functions": functions,
            **environment,
        }
    )


def answered_rows(
    requests: Sequence[GenerationRequest], prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> list[dict[str, Any]]:
    """The ``episodes`` rows of the requests that were answered before the deadline."""
    return [
        episode_row(request, prompts[place_of(request.request_id)[0]], completion)
        for request, completion in zip(requests, completions, strict=True)
        if completion.metadata["finish_reason"] != "aborted"
    ]
