"""Which models get new weights in place, and that an engine's workers have what does it."""

import importlib.util

import pytest
from torch import nn

from forge_core.generation import vllm_in_place
from forge_core.generation.vllm_settings import VLLMSettings

vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (scripts/install_vllm_cpu.sh)")


def model(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 4), *layers)


def layer(method: object) -> nn.Module:
    made = nn.Linear(4, 4)
    made.quant_method = method  # type: ignore[assignment]
    return made


@vllm
def test_only_layers_that_serve_their_files_get_weights_in_place() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class Packed(UnquantizedLinearMethod):
        """A method of vLLM that inherits may repack what it has loaded."""

    class Derived(nn.Linear):
        def process_weights_after_loading(self) -> None:
            """Such as MLA, which splits its matrices."""

    plain = [layer(UnquantizedLinearMethod()), layer(UnquantizedEmbeddingMethod()), layer(None)]
    assert vllm_in_place.serves_files(model(*plain))
    assert not vllm_in_place.serves_files(model(*plain, layer(Packed())))
    assert not vllm_in_place.serves_files(model(*plain, Derived(4, 4)))
    assert not vllm_in_place.serves_files(model(*plain, layer(object())))


@vllm
def test_off_a_gpu_vllm_reloads() -> None:
    asked = []

    class Runner:
        def get_model(self) -> nn.Module:
            return model()

        def reload_weights(self, **options: str) -> None:
            asked.append(options)

    worker = vllm_in_place.InPlace()
    worker.model_runner = Runner()  # type: ignore[attr-defined]
    worker.load_in_place("/weights/7")
    assert asked == [{"weights_path": "/weights/7"}]


def test_a_user_may_have_an_extension_of_his_own(tmp_path) -> None:
    ours = VLLMSettings().arguments(0, tmp_path)
    theirs = VLLMSettings(engine_args={"worker_extension_cls": "mine.Worker"}).arguments(0, tmp_path)
    assert ours["worker_extension_cls"] == "forge_core.generation.vllm_in_place.InPlace"
    assert theirs["worker_extension_cls"] == "mine.Worker"
