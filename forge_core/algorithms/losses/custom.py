"""A loss in the user's own file, named in the configuration: ``loss: {name: custom, path: my_loss.py:CustomLoss}``.

It is called with ``(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs)`` for every
micro-batch and returns ``(loss, metrics)``: means over the micro-batch's loss tokens, which the trainer weights by the
micro-batch's share of them. ``path`` names a class (``nn.Module`` or not, made with ``options``) or a function (called
with ``options`` as keyword arguments). A class that derives from ``PolicyLoss`` is used like the built-in losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from numbers import Real
from typing import Any

from torch import Tensor

from forge_core.algorithms.losses.base import Loss, PolicyLoss
from forge_core.algorithms.losses.probe import described
from forge_core.config.errors import ConfigError
from forge_core.config.references import revealed
from forge_core.data.importing import ObjectPathError, load_object, misfit, mistyped
from forge_core.redaction import redact

ARGUMENTS = ("logits", "target_ids", "advantages", "generator_logprobs", "loss_mask", "ref_logprobs")


class CustomLoss(Loss):
    """A user's function or object as a loss. ``path``: how the configuration names it, for errors."""

    def __init__(self, function: Any, path: str) -> None:
        self._function, self._path = function, path

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Raises ConfigError, naming ``loss.path``, for a result that is no pair of a scalar tensor with a gradient and
        metrics. What the function itself raises has a note that names it."""
        try:
            result = self._function(*tensors)
        except Exception as error:  # the formula is the user's code
            error.add_note(f"raised by the loss {self._path} (loss.path)")
            raise
        if wrong := _wrong(result, tensors[0].requires_grad):
            raise ConfigError(
                [
                    f"loss.path: {self._path} returned {wrong}; it must return (loss, metrics): a tensor of one "
                    "number, and a mapping of names to numbers or scalar tensors, which may be empty: return loss, {}"
                ]
            )
        return result


def _wrong(result: Any, trains: bool) -> str | None:
    """What is wrong with what a loss returned; None: nothing. ``trains``: whether a gradient is wanted."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        return described(result)
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(metrics, Mapping):
        return described(result)
    if trains and not loss.requires_grad:
        return "a loss that does not depend on the logits (it has no gradient)"
    for name, value in metrics.items():
        if not isinstance(name, str):
            return f"a metric whose name is {name!r}"
        if not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)):
            return f"{described(value)} as the metric {name!r}"
    return None


def load_custom_loss(path: str, options: dict[str, Any]) -> PolicyLoss | CustomLoss:
    """The loss that ``path`` names, made with ``options``. Raises ConfigError naming ``loss.path``."""
    try:
        found = load_object(path)
        arguments = revealed(options, "loss.options")
        if wrong := mistyped(found, arguments):
            raise ConfigError([f"loss.options: of {path}: {wrong}"])
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
    return CustomLoss(made, path)


def _check_call(made: Any, path: str) -> None:
    """Make sure that the loss can be called with the six tensors."""
    if error := misfit(getattr(made, "forward", made), *ARGUMENTS):
        raise ConfigError([f"loss.path: {path} cannot be called as ({', '.join(ARGUMENTS)}): {error}"]) from error
