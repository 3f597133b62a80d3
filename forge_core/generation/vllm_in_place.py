"""What Forge adds to the workers of a vLLM engine: new weights are copied into the parameters that it serves from.

vLLM's own ``reload_weights`` makes every layer anew, loads it and copies it back, for layers that change their weights
after loading (quantized, packed); the engine stands still several times as long as the copy alone takes.

Invariants:
- Weights are copied in place on GPUs only, and only where every layer serves its weights as they are in the files. In
  all other cases vLLM reloads them.
- Parameters keep their addresses either way: captured CUDA graphs stay right.
- When ``load_in_place`` returns, every copy has arrived.

The caller has checked names, shapes and types of the files (``engine_weights``), and no step of the engine runs.
"""

from __future__ import annotations

from typing import Any

EXTENSION = f"{__name__}.InPlace"


class InPlace:
    """A ``worker_extension_cls`` of vLLM: a base of its worker, whose attributes it uses."""

    def load_in_place(self, folder: str) -> None:
        """Serve the weights of the model folder ``folder`` from now on."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        device = next(model.parameters()).device
        if device.type != "cuda" or not serves_files(model):
            runner.reload_weights(weights_path=folder)
            return
        import torch
        from vllm.model_executor.model_loader import get_model_loader

        runner.model_config.model = folder
        loader: Any = get_model_loader(runner.load_config)
        with torch.no_grad():
            model.load_weights(loader.get_all_weights(runner.model_config, model))
        torch.cuda.current_stream(device).synchronize()


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
