"""Shaping around the loss: the reward of overlong responses and the weight of the KL penalty.

Pure functions: nothing here knows where episodes are stored. Which groups have a gradient is ``advantages.has_signal``.
"""

from __future__ import annotations

from dataclasses import dataclass


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476), to add to the reward of a response of ``length`` tokens.

    0 up to ``max_length - buffer``, then a line down to ``-factor`` at ``max_length``, and ``-factor`` beyond.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the buffer is {buffer} tokens; it must be between 1 and max_length={max_length}")
    over = length - (max_length - buffer)
    return -factor * min(over / buffer, 1.0) if over > 0 else 0.0


@dataclass(frozen=True)
class AdaptiveKL:
    """Steers the weight of the KL penalty so that the KL stays near ``target`` (nats per token).

    ``beta <- beta (1 + gain * clip(KL / target - 1, -0.2, 0.2))`` after every optimizer step.
    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), gain 0.1.
    """

    target: float
    gain: float = 0.1

    def adapt(self, beta: float, kl: float) -> float:
        """The next ``beta``, given the mean KL per token of the last step."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return beta * (1.0 + self.gain * error)
