"""From a request to a response: of the engine alone, or of the engine and an environment that answers it.

Invariant: what decides an environment's answers (its source, options, limits, how calls are read) is part of what is
asked for, so episodes of another environment are never taken for this one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_core.config import RunConfig
from forge_core.config.rollout_sections import EnvironmentSection
from forge_core.data.prompts import Prompt
from forge_core.data_model import Completion, GenerationRequest
from forge_core.environments.errors import BrokenEnvironment
from forge_core.environments.protocol import Task
from forge_core.environments.resolve import environment_source
from forge_core.stop import StopToken

if TYPE_CHECKING:
    from forge_core.environments.rollout import Play
    from forge_core.generation.base import Generator

DECIDES_NOTHING = {"workers", "max_open", "max_broken_share"}


def respond(
    config: RunConfig,
    play: Play | None,
    engine: Generator,
    requests: Sequence[GenerationRequest],
    prompts: Mapping[str, Prompt],
    stop: StopToken | None,
) -> list[Completion]:
    """One completion per request, in order. ``prompts``: by request id. Raises BrokenEnvironment when so many episodes
    are dropped because of their environments that it is no accident."""
    deadline_s = config.rollout.deadline_s
    if play is None:
        return engine.generate(requests, stop=stop, deadline_s=deadline_s)
    from forge_core.environments.rollout import run_episodes

    tasks = {r.request_id: _task(prompts[r.request_id], r) for r in requests}
    completions = run_episodes(play, engine, requests, tasks, stop=stop, deadline_s=deadline_s)
    _refuse_outage(config, completions)
    return completions


def is_broken(completion: Completion) -> bool:
    """Whether the episode was dropped because of its environment."""
    from forge_core.environments.rollout import BROKEN

    return (completion.metadata.get("dropped") or "").startswith(BROKEN)


def environment_identity(section: EnvironmentSection | None) -> dict[str, Any]:
    """The part of a request's digest; nothing without an environment."""
    if section is None:
        return {}
    settings = section.model_dump(mode="json", exclude=DECIDES_NOTHING)
    return {"environment": {**settings, "source": environment_source(section.path)}}


def _refuse_outage(config: RunConfig, completions: Sequence[Completion]) -> None:
    broken = [c.metadata["dropped"] for c in completions if is_broken(c)]
    section = config.environment
    assert section is not None
    if broken and len(broken) / len(completions) > section.max_broken_share:
        raise BrokenEnvironment(
            f"the environments of {len(broken)} of {len(completions)} episodes broke, more than "
            f"environment.max_broken_share={section.max_broken_share:g} allows; the first: {broken[0]}"
        )


def _task(prompt: Prompt, request: GenerationRequest) -> Task:
    return Task(prompt.messages, prompt.target, prompt.metadata, request.seed)
