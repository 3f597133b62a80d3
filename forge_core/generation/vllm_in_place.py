"""What Forge adds to the workers of a vLLM engine: new weights are copied into the parameters that it serves from.

vLLM's own ``reload_weights`` makes every layer anew, loads it and copies it back, for layers that change their weights
after loading (quantized, packed); the engine stands still several times as long as the copy alone takes.

Invariants:
- Weights are copied in place on GPUs only, and only where every layer serves its weights as they are in the files. In
  all other cases vLLM reloads them.
- Parameters keep their addresses either way: captured CUDA graphs stay right.
- While ``stage`` reads files into page-locked memory the engine goes on; nothing that it serves from changes before
  ``load_in_place``. What was staged is of the folder that is loaded, or it is not used.
- When ``load_in_place`` returns, every copy has arrived.

The caller has checked names, shapes and types of the files (``engine_weights``), and no step of the engine runs while
weights are loaded.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

EXTENSION = f"{__name__}.InPlace"
STAGED_BYTES = 4 << 30  # of page-locked memory that a worker takes; what is beyond is copied from the files
ALIGNMENT = 512

Named = tuple[str, "Tensor"]


class InPlace:
    """A ``worker_extension_cls`` of vLLM: a base of its worker, whose attributes it uses."""

    _staging: Staging | None = None

    def stage(self, folder: str) -> None:
        """Begin to read the weights of the model folder ``folder``, where ``load_in_place`` will copy them."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if _copies(runner.get_model()):
            last = self._staging
            buffer = last.buffer if last is not None and last.done else None
            self._staging = Staging(folder, _files(runner, folder), buffer)

    def staged(self) -> bool:
        """Whether all is read that was to be (or could not be read: ``load_in_place`` raises that)."""
        return self._staging is None or self._staging.done

    def load_in_place(self, folder: str) -> None:
        """Serve the weights of the model folder ``folder`` from now on."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        if not _copies(model):
            runner.reload_weights(weights_path=folder)
            return
        import torch

        runner.model_config.model = folder
        staging, device = self._staging, next(model.parameters()).device
        with torch.no_grad():
            if staging is not None and staging.folder == folder:
                model.load_weights(staging.take())
            else:
                model.load_weights(_files(runner, folder))
        torch.cuda.current_stream(device).synchronize()  # what was staged may be written over from here on


class Staging:
    """The weights of ``folder`` on their way into page-locked memory, read by a thread of its own. ``buffer``: memory
    of an earlier one, whose copies have arrived."""

    def __init__(self, folder: str, weights: Iterable[Named], buffer: Tensor | None, *, page_locked: bool = True):
        self.folder, self.buffer = folder, buffer
        self._page_locked = page_locked
        self._weights: list[Named] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(weights,), name="staging", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def take(self) -> list[Named]:
        """All of them, once they are there; only the buffer is kept (a tensor of a file keeps that file's memory).
        Raises what went wrong with reading them."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        self.folder, taken, self._weights = "", self._weights, []
        return taken

    def _read(self, weights: Iterable[Named]) -> None:
        try:
            self._weights = list(self._copied(list(weights)))
        except BaseException as error:  # of whoever asks for the weights
            self._error = error

    def _copied(self, weights: list[Named]) -> Iterator[Named]:
        """Each tensor, or its copy in page-locked memory where there is room for it."""
        import torch

        wanted = min(sum(_room(tensor) for _, tensor in weights), STAGED_BYTES)
        if self.buffer is None or self.buffer.numel() < wanted:
            self.buffer = None  # before the larger one
            self.buffer = torch.empty(wanted, dtype=torch.uint8, pin_memory=self._page_locked)
        used = 0
        for name, tensor in weights:
            if used + _room(tensor) > self.buffer.numel():
                yield name, tensor
                continue
            place = self.buffer[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            used += _room(tensor)
            yield name, place.copy_(tensor)


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _files(runner: Any, folder: str) -> Iterator[Named]:
    """What vLLM's loader reads in ``folder``; opened as it is iterated over."""
    from vllm.model_executor.model_loader import get_model_loader

    model_config, load_config = copy.copy(runner.model_config), copy.copy(runner.load_config)
    model_config.model, load_config.use_tqdm_on_load = folder, False  # a bar in the log for every version
    loader: Any = get_model_loader(load_config)
    return loader.get_all_weights(model_config, runner.get_model())


def _copies(model: Any) -> bool:
    """Whether ``model`` gets its weights in place."""
    return next(model.parameters()).device.type == "cuda" and serves_files(model)


def serves_files(model: Any) -> bool:
    """Whether no layer of a vLLM model changes its weights after loading them."""
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    as_they_are = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)

    def changes(module: Any) -> bool:
        """``Attention`` has scales of a quantized cache only, whose method is then no None."""
        method = getattr(module, "quant_method", None)
        later = hasattr(module, "process_weights_after_loading") and not isinstance(module, Attention)
        return later or type(method) not in as_they_are

    return not any(changes(module) for module in model.modules())
