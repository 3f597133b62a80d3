"""The reward that an episode's environment gave, all turns added up."""

from __future__ import annotations

from typing import Any


class EnvironmentReward:
    """Needs a run with an ``environment`` section."""

    needs_answer = False

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        if "environment" not in metadata:
            raise ValueError("reward environment: the episode was made without an environment: set environment.path")
        return float(metadata["environment"]["reward"])
