"""Float32 master parameters beside a model that computes in a narrower type, on one rank.

Guarantees:
- The optimizer, checkpoints, exports and digests see the masters; the model holds rounded copies of them.
- Gradients are added up in float32.

With several ranks FSDP does the same while it gathers and reduces. On one rank its bookkeeping for each layer would
cost the host more time than the GPU needs for the layer. A float32 model on one rank, and one that FSDP divides, are
their own masters; so are parameters that are not trained, in the compute type.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_core.training.hf_io import named_parameters


class Masters:
    """``parameters``: by name, what is loaded, stepped, saved and published; ``trained``: those of them that get
    gradients. ``copies``: the model's own of these, in the same order, where they are others."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        self.parameters = dict(named_parameters(model))
        self.copies: list[nn.Parameter] = []
        own = list(self.parameters.values())
        whole = not any(isinstance(parameter, DTensor) for parameter in own)
        if whole and compute_dtype != torch.float32:
            trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
            self.copies = list(trained.values())
            self.parameters |= {name: nn.Parameter(copy.detach()) for name, copy in trained.items()}
            for parameter in own:
                parameter.data = parameter.data.to(compute_dtype)
        self.trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @torch.no_grad()
    def refresh(self) -> None:
        """The masters have changed: round them again."""
        if self.copies:
            torch._foreach_copy_([copy.data for copy in self.copies], list(self.trained.values()))

    def clear(self) -> None:
        """Forget the gradients of a backward pass that was not collected."""
        for copy in self.copies:
            copy.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """After a backward pass: add the copies' gradients to the masters'."""
        pairs = zip(self.copies, self.trained.values(), strict=True) if self.copies else ()
        moved = [(copy.grad, master) for copy, master in pairs if copy.grad is not None]
        first = [(gradient, master) for gradient, master in moved if master.grad is None]
        more = [(gradient, master.grad) for gradient, master in moved if master.grad is not None]
        if first:
            made = [torch.empty_like(master) for _, master in first]
            torch._foreach_copy_(made, [gradient for gradient, _ in first])
            for (_, master), gradient in zip(first, made, strict=True):
                master.grad = gradient
        if more:
            torch._foreach_add_([total for _, total in more], [gradient for gradient, _ in more])
        self.clear()
