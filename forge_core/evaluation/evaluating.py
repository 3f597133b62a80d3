"""Evaluating a policy: sample the held-out prompts, grade the answers, store them under the digest of what was asked.

Invariants:
- ``evaluations/<identity>/`` is one evaluation for ever, whoever asks for it: what exists is not done again, and what a
  run did while it trained is taken over as it is.
- Who asks again is answered without a tokenizer, whose import takes seconds: ``evaluations/asked/`` says which
  evaluation it was, by the digest of all that decides it.
- Everything that can be wrong with the configuration is found before an engine is loaded.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from forge_core.config import ConfigError, RunConfig
from forge_core.config.gpu_gate import check_leased
from forge_core.data.identity import prompt_digest
from forge_core.data.prompts import Prompt, load_prompts, render
from forge_core.data_model import SCHEMA_VERSION, GenerationRequest
from forge_core.devices import Placement, alone, place, visible_gpus
from forge_core.environments.resolve import build_play, tools_of
from forge_core.evaluation.policies import Policy
from forge_core.evaluation.suite import answered_rows, heldout_prompts, identity, place_of, suite_requests
from forge_core.generation.base import Generator
from forge_core.gpu_leases import lease
from forge_core.rewards.actor import RewardActor
from forge_core.rewards.identity import reward_identity
from forge_core.runs.checks import check_run
from forge_core.runs.code import forge_version
from forge_core.runs.engines import build_generator
from forge_core.runs.episodes import EPISODES_FILE, REWARDS_FILE, episode_of, episodes_bytes, rewards_bytes
from forge_core.runs.responding import environment_identity, respond
from forge_core.stop import StopToken
from forge_core.store import Ledger, Store, digest, layout

log = logging.getLogger("forge")


def evaluate_policy(
    store: Store, config: RunConfig, policy: Policy, stop: StopToken, note: Callable[[str], None]
) -> str:
    """The prefix of the evaluation of ``policy`` that ``config`` describes, made now unless it exists. Raises
    ConfigError, DataError, ModelError, RewardError before any work, and Stopped."""
    work = _Work(store, config, policy, stop)
    if prefix := work.asked_before() or work.done_before():
        note(f"{policy.name}: evaluated before: {prefix}")
        return prefix
    if work.take_over():
        note(f"{policy.name}: evaluated by its run: {work.prefix}")
    else:
        note(f"{policy.name}: evaluating {len(work.requests)} responses to {len(work.prompts)} prompts")
        work.do()
    work.remember()
    return work.prefix


def evaluation_prefix(store: Store, config: RunConfig, policy: Policy) -> str:
    """Where the evaluation of ``policy`` lies, or will."""
    return _Work(store, config, policy, StopToken()).prefix


class _Work:
    """One evaluation; a ``Host`` of the engine that samples it."""

    def __init__(self, store: Store, config: RunConfig, policy: Policy, stop: StopToken) -> None:
        if config.eval.prompts == 0:
            raise ConfigError("eval.prompts: is 0, so there is nothing to evaluate: set it, such as eval.prompts=256")
        self._store, self._policy, self.stop = store, policy, stop
        self.folder = policy.folder(store)
        changes = {"model": str(self.folder), "warm_start": None, "store": store.uri}
        self.config = alone(config.model_copy(update=changes), "generator")
        check_run(self.config)
        self.run_id = f"evaluation-{policy.digest[:12]}"
        self.role: str | None = "evaluation"
        self._leases = ExitStack()  # of GPUs

    # What is asked ------------------------------------------------------------------------------------------------

    @cached_property
    def prompts(self) -> list[Prompt]:
        assert self.config.dataset is not None
        return heldout_prompts(self.config, load_prompts(self.config.dataset, seed=self.config.run.seed))

    @cached_property
    def requests(self) -> list[GenerationRequest]:
        from forge_core.models.scratch import check_encodable  # imports torch

        tokenizer, section = self._tokenizer, self.config.dataset
        assert section is not None
        tools = tools_of(self.config.environment)

        def encode(prompt: Prompt) -> list[int]:
            text = "".join(message["content"] for message in prompt.messages)
            check_encodable(tokenizer, text, f"dataset.path: row {prompt.row},")
            return render(prompt, tokenizer, section.chat_template, tools)

        found = suite_requests(self.config, self.prompts, encode, f"evaluation/{self._policy.digest[:12]}", 0)
        if not found:
            raise ConfigError(
                f"eval.prompts: no held-out prompt of {section.path} fits into {self.config.max_prompt_tokens} tokens: "
                "raise training.seq_len or eval.holdout, or name a split with eval.split"
            )
        return found

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)

    @cached_property
    def identity(self) -> str:
        environment = environment_identity(self.config.environment)
        return identity(
            self._policy.digest,
            self.requests,
            self.prompts,
            reward_identity(self.config.rewards.functions),
            environment,
        )

    @property
    def prefix(self) -> str:
        return layout.evaluation_of(self.identity)

    @cached_property
    def question(self) -> str:
        """Digest of what decides ``identity``; the tokenizer's part is known by its files and the library."""
        dataset, rollout = self.config.dataset, self.config.rollout
        assert dataset is not None
        return digest(
            {
                "weights": self._policy.digest,
                "prompts": [(prompt_digest(prompt), prompt.task) for prompt in self.prompts],
                "eval": self.config.eval.model_dump(mode="json"),
                "seed": self.config.run.seed,
                "lengths": (self.config.max_prompt_tokens, rollout.max_new_tokens),
                "rendering": (dataset.chat_template, list(tools_of(self.config.environment))),
                "functions": reward_identity(self.config.rewards.functions),
                **environment_identity(self.config.environment),
                "code": (SCHEMA_VERSION, forge_version(), metadata.version("transformers")),
            }
        )

    # What is there already -----------------------------------------------------------------------------------------

    def asked_before(self) -> str | None:
        """The evaluation that the same question had before, if it is there."""
        key = layout.evaluation_asked(self.question)
        if not self._store.exists(key):
            return None
        prefix = layout.evaluation_of(self._store.read_json(key)["evaluation"])
        return prefix if self._store.published(prefix) else None

    def done_before(self) -> str | None:
        """The same, whatever it was asked as."""
        if not self._store.published(self.prefix):
            return None
        self.remember()
        return self.prefix

    def remember(self) -> None:
        """Write down which evaluation answers the question."""
        self._store.put_json(layout.evaluation_asked(self.question), {"evaluation": self.identity})

    # How it is done -----------------------------------------------------------------------------------------------

    def take_over(self) -> bool:
        """Publish what the run of this version has sampled and graded already, if it asked for the same."""
        version = self._policy.version
        if version is None:
            return False
        ledger = Ledger(self._store, version.run_id)
        entry = ledger.entry(version.version - 1) if version.version else ledger.init()
        assert entry is not None
        theirs = layout.evaluation(version.run_id, version.version, entry["weights_digest"])
        if not self._store.published(theirs):
            return False
        published = self._store.open_published(theirs)
        if published.manifest.request != self.identity:
            return False
        files = {name: published.read(name) for name in (EPISODES_FILE, REWARDS_FILE)}
        self._publish(files, {**published.manifest.provenance, "taken_from": theirs})
        return True

    def do(self) -> None:
        """Sample, grade, publish."""
        from forge_core.runs.stages import refuse_outage, reward_item  # imports torch

        rewards = RewardActor.from_config(self.config.rewards)
        try:
            rows, seconds = self._sample()
            episodes = [episode_of(row) for row in rows]
            graded = rewards.grade_many([reward_item(e) for e in episodes], stop=self.stop)
        finally:
            rewards.close()
        refuse_outage(self.config, self.prefix, graded)
        files = {EPISODES_FILE: episodes_bytes(rows), REWARDS_FILE: rewards_bytes(episodes, graded)}
        tokens = sum(len(e.response_ids) for e in episodes)
        self._publish(files, {"seconds": seconds, "tokens": tokens, "backend": self.config.generator.backend})

    def _sample(self) -> tuple[list[dict[str, Any]], float]:
        """The rows of the answered requests, and the seconds that the engine worked (loading it not counted)."""
        with self._leases:
            return self._sample_on(build_generator(self, 0))

    def _sample_on(self, engine: Generator) -> tuple[list[dict[str, Any]], float]:
        try:
            play = build_play(self.config, self._tokenizer)
            prompts = {r.request_id: self.prompts[place_of(r.request_id)[0]] for r in self.requests}
            started = time.monotonic()
            completions = respond(self.config, play, engine, self.requests, prompts, self.stop)
            seconds = time.monotonic() - started
        finally:
            engine.shutdown()
        return answered_rows(self.requests, self.prompts, completions), seconds

    def _publish(self, files: dict[str, bytes], provenance: dict[str, Any]) -> None:
        version = self._policy.version
        about = {"policy": self._policy.name, "version": str(version or ""), "asked": len(self.requests)}
        self._store.publish(self.prefix, files, request=self.identity, provenance={**provenance, **about})

    # The host of the engine ---------------------------------------------------------------------------------------

    def weights_dir(self, version: int) -> Path:
        return self.folder

    @cached_property
    def placement(self) -> Placement:
        placement, held = lease(visible_gpus(), lambda gpus: place(self.config, gpus))
        self._leases.enter_context(closing(held))
        if held.warning:
            log.warning(held.warning)
        check_leased(self.config, placement)
        return placement

    @cached_property
    def cpu_threads(self) -> int:
        return len(os.sched_getaffinity(0))

    def device(self, role: str) -> str:
        return self.placement.device(role)
