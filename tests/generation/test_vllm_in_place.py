"""Which models get new weights in place, and that an engine's workers have what does it."""

import functools
import importlib.util
from types import SimpleNamespace

import pytest
import torch
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
    worker.stage("/weights/7")
    assert worker.staged()
    worker.load_in_place("/weights/7")
    assert asked == [{"weights_path": "/weights/7"}]


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.randn(shape).to(dtype)) for i, shape in enumerate(shapes)]


def staged(weights, buffer=None) -> vllm_in_place.Staging:
    return vllm_in_place.Staging("/w", weights, buffer, page_locked=False)


def test_staged_weights_are_copies_and_use_the_same_memory_again() -> None:
    first, second = tensors((3, 5), (7,), (2, 2, 2)), [*tensors((3, 5)), *tensors((4,), dtype=torch.float32)]
    one = staged(first)
    found = dict(one.take())
    assert one.done
    assert list(found) == ["w0", "w1", "w2"]
    assert all(torch.equal(found[name], tensor) and found[name] is not tensor for name, tensor in first)
    two = staged(second, one.buffer)
    assert all(torch.equal(found, tensor) for (_, found), (_, tensor) in zip(two.take(), second, strict=True))
    assert two.buffer is one.buffer
    larger = staged(tensors((1000, 10)), one.buffer)
    assert len(larger.take()) == 1
    assert larger.buffer is not one.buffer


def test_what_is_beyond_the_memory_for_staging_is_taken_from_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_in_place, "STAGED_BYTES", 2 * vllm_in_place.ALIGNMENT)
    given = tensors((256,), (512,), (256,), (256,))  # of 512, 1024, 512 and 512 bytes
    found = staged(given).take()
    assert [new is old for (_, new), (_, old) in zip(found, given, strict=True)] == [False, True, False, True]
    assert all(torch.equal(new, old) for (_, new), (_, old) in zip(found, given, strict=True))


def test_weights_that_cannot_be_read_are_an_error_of_the_load() -> None:
    def broken():
        yield from tensors((2,))
        raise OSError("no such file")

    staging = staged(broken())
    with pytest.raises(OSError, match="no such file"):
        staging.take()
    assert staging.done


@vllm
def test_what_was_staged_of_another_folder_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []

    class Model(nn.Linear):
        def load_weights(self, weights) -> None:
            loaded.extend(weights)

    served = Model(2, 2)
    worker = vllm_in_place.InPlace()
    worker.model_runner = SimpleNamespace(get_model=lambda: served, model_config=SimpleNamespace(model="/w/0"))  # type: ignore[attr-defined]
    monkeypatch.setattr(vllm_in_place, "_copies", lambda model: True)
    monkeypatch.setattr(vllm_in_place, "_files", lambda runner, folder: iter([(folder, torch.ones(2))]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    plain = functools.partial(vllm_in_place.Staging, page_locked=False)
    monkeypatch.setattr(vllm_in_place, "Staging", plain)
    worker.stage("/w/1")
    worker.load_in_place("/w/1")
    worker.load_in_place("/w/2")
    worker.stage("/w/3")
    worker.load_in_place("/w/3")
    assert worker._staging is not None
    assert not worker._staging._weights, "tensors of files keep their memory"
    worker.load_in_place("/w/3")
    assert [name for name, _ in loaded] == ["/w/1", "/w/2", "/w/3", "/w/3"]
    assert worker.model_runner.model_config.model == "/w/3"  # type: ignore[attr-defined]


def test_a_user_may_have_an_extension_of_his_own(tmp_path) -> None:
    ours = VLLMSettings().arguments(0, tmp_path)
    theirs = VLLMSettings(engine_args={"worker_extension_cls": "mine.Worker"}).arguments(0, tmp_path)
    assert ours["worker_extension_cls"] == "forge_core.generation.vllm_in_place.InPlace"
    assert theirs["worker_extension_cls"] == "mine.Worker"
