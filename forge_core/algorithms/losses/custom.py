"""A loss in the user's own file, named in the configuration: ``loss: {name: custom, path: my_loss.py:CustomLoss}``.

It is called with ``(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs)`` for every
micro-batch and returns ``(loss, metrics)``: means over the micro-batch's loss tokens, which the trainer weights by the
micro-batch's share of them. ``path`` names a class (``nn.Module`` or not, made with ``options``) or a function (called
with ``options`` as keyword arguments). A class that derives from ``PolicyLoss`` is used like the built-in losses.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor

from forge_core.algorithms.losses.base import Loss, PolicyLoss
from forge_core.config.errors import ConfigError
from forge_core.config.references import revealed
from forge_core.data.importing import ObjectPathError, load_object
from forge_core.redaction import redact

ARGUMENTS = ("logits", "target_ids", "advantages", "generator_logprobs", "loss_mask", "ref_logprobs")


class CustomLoss(Loss):
    """A user's function or object as a loss."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return self._function(*tensors)


def load_custom_loss(path: str, options: dict[str, Any]) -> PolicyLoss | CustomLoss:
    """The loss that ``path`` names, made with ``options``. Raises ConfigError naming ``loss.path``."""
    try:
        found = load_object(path)
        arguments = revealed(options, "loss.options")
        made = found(**arguments) if inspect.isclass(found) else partial(found, **arguments)
    except ObjectPathError as error:
        raise ConfigError([f"loss.path: {error}"]) from error
    except ConfigError:
        raise
    except Exception as error:  # the constructor is the user's code
        raise ConfigError(
            [f"loss.options: making {path} with {options} failed: {type(error).__name__}: {redact(str(error))}"]
        ) from error
    if isinstance(made, PolicyLoss):
        return made
    _check_call(made, path)
    return CustomLoss(made)


def _check_call(made: Any, path: str) -> None:
    """Make sure that the loss can be called with the six tensors."""
    try:
        inspect.signature(getattr(made, "forward", made)).bind(*ARGUMENTS)
    except TypeError as error:
        raise ConfigError([f"loss.path: {path} cannot be called as ({', '.join(ARGUMENTS)}): {error}"]) from error
