"""A reward model in a Hugging Face folder: a tiny one that is made here, with real weights, tokenizer and batches."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

from forge_core.config import load_config
from forge_core.config.reward_sections import RewardModelSection
from forge_core.observability.memory import is_out_of_memory
from forge_core.rewards import RewardActor, RewardError, RewardItem
from forge_core.rewards.identity import check_rewards, reward_identity
from forge_core.stop import Stopped, StopToken

pytestmark = pytest.mark.engine
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
WORDS = ["<pad>", "<eos>", "<unk>", "[user]", "[assistant]", "[system]", *[f"w{n}" for n in range(40)]]


def save(folder: Path, labels: int = 1, template: str | None = TEMPLATE, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    limits = {"vocab_size": len(WORDS), "max_position_embeddings": 64, "num_labels": labels}
    model = Qwen3ForSequenceClassification(Qwen3Config(**sizes, **heads, **limits))
    model.score.weight.data.mul_(50)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("reward") / "one")


def actor(folder: Path, **options: Any) -> RewardActor:
    return RewardActor([RewardModelSection(name="reward_model", model=str(folder), **options)])


def items(count: int = 20) -> list[RewardItem]:
    return [RewardItem("w1 w2", " ".join(f"w{(n * k) % 40}" for k in range(1, 2 + n)), {}) for n in range(count)]


def direct(folder: Path, text: str) -> torch.Tensor:
    """What transformers gives for one text, without batches."""
    model = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    ids = PreTrainedTokenizerFast.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    model.config.pad_token_id = 1
    with torch.inference_mode():
        return model(ids).logits[0]


def test_rewards_are_the_models_output_for_the_rendered_conversation_whatever_the_batch(folder: Path):
    expected = [direct(folder, f"[user] w1 w2 [assistant] {item.completion} ").item() for item in items()]
    for size in (1, 7, 64):
        graded, metrics = actor(folder, batch_size=size).grade_with_metrics(items())
        assert [g.reward for g in graded] == pytest.approx(expected, abs=1e-4)
    assert len({round(value, 4) for value in expected}) > 10
    assert metrics["reward_model/tokens"] == sum(4 + n + 1 for n in range(20))
    assert metrics["reward_model/seconds"] > 0


def test_all_messages_of_the_prompt_are_read(folder: Path):
    messages = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w3"}]
    graded = actor(folder).grade_many([RewardItem("w3", "w4", {"prompt_messages": messages})])
    assert graded[0].reward == pytest.approx(direct(folder, "[system] w9 [user] w3 [assistant] w4 ").item(), abs=1e-4)


def test_without_a_chat_template_prompt_and_response_are_one_text(tmp_path: Path):
    plain = save(tmp_path / "plain", template=None)
    graded = actor(plain).grade_many([RewardItem("w1 w2 ", "w3")])
    assert graded[0].reward == pytest.approx(direct(plain, "w1 w2 w3").item(), abs=1e-4)


def test_the_output_can_be_a_probability(folder: Path, tmp_path: Path):
    item = RewardItem("w1", "w5 w6")
    raw, sigmoid = (actor(folder, sigmoid=on).grade_many([item])[0].reward for on in (False, True))
    assert sigmoid == pytest.approx(torch.sigmoid(torch.tensor(raw)).item())
    three = save(tmp_path / "three", labels=3)
    shares = [actor(three, label=label).grade_many([item])[0].reward for label in range(3)]
    assert sum(shares) == pytest.approx(1.0)
    assert shares[2] == pytest.approx(direct(three, "[user] w1 [assistant] w5 w6 ").softmax(-1)[2].item(), abs=1e-5)


def test_a_text_that_is_too_long_is_an_error_not_cut(folder: Path):
    graded = actor(folder).grade_many([RewardItem("w1", "w2 " * 100), *items(3)])
    assert [g.reward is None for g in graded] == [True, False, False, False]
    assert graded[0].error == "reward_model: 103 tokens, more than the 64 that the reward model can read"
    assert actor(folder, max_length=5).grade_many(items(3))[1].status == "error"


def test_a_slow_batch_ends_the_call_with_nulls(folder: Path):
    graded = actor(folder, batch_size=5, timeout_s=1e-6).grade_many(items(10))
    assert [g.status for g in graded] == ["timeout"] * 5 + ["ok"] * 5  # the longest first


def test_a_stop_and_calls_from_several_threads(folder: Path):
    stop = StopToken()
    stop.set("Ctrl-C")
    shared = actor(folder, batch_size=4)
    with pytest.raises(Stopped):
        shared.grade_many(items(), stop=stop)
    results: list[list[float | None]] = []
    threads = [threading.Thread(target=lambda: results.append([g.reward for g in shared.grade_many(items())]))] * 1
    threads += [threading.Thread(target=lambda: results.append([g.reward for g in shared.grade_many(items())]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1]


@pytest.mark.parametrize("where", ["to", "forward"])
def test_memory_that_runs_out_is_named_with_the_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def scarce(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Qwen3ForSequenceClassification, where, scarce)
    with pytest.raises(Exception, match=r"reward model: out of memory, when 2\.00 GiB more(.|\n)*batch_size") as caught:
        actor(folder).grade_many(items(3))
    assert is_out_of_memory(caught.value)


def config_of(folder: Path, **options: Any):
    return load_config({"rewards": {"functions": [{"name": "reward_model", "model": str(folder), **options}]}}).rewards


def test_the_weights_and_not_the_folder_are_what_identifies_the_reward(folder: Path, tmp_path: Path):
    same = shutil.copytree(folder, tmp_path / "copy")
    other = save(tmp_path / "other", seed=1)
    first = reward_identity(config_of(folder).functions)
    assert reward_identity(config_of(same, batch_size=3, device="cpu").functions) == first
    assert reward_identity(config_of(other).functions) != first
    assert reward_identity(config_of(folder, sigmoid=True).functions) != first


def test_a_folder_that_holds_no_reward_model_is_refused_before_anything_is_loaded(folder: Path, tmp_path: Path):
    for name, problem in (("gone", "no folder with a config.json"), ("other", "is no ...ForSequenceClassification")):
        if name == "other":
            shutil.copytree(folder, tmp_path / name)
            described = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
            (tmp_path / name / "config.json").write_text(json.dumps(described))
        with pytest.raises(RewardError, match=problem):
            check_rewards(config_of(tmp_path / name).functions)
    without = shutil.copytree(folder, tmp_path / "without")
    (without / "model.safetensors").rename(without / "pytorch_model.bin")
    with pytest.raises(RewardError, match="only safetensors are read"):
        check_rewards(config_of(without).functions)
    check_rewards(config_of(folder).functions)


@pytest.mark.parametrize(("labels", "options"), [(1, {"label": 0}), (3, {}), (3, {"label": 3}), (2, {"sigmoid": True})])
def test_the_label_has_to_fit_the_outputs(tmp_path: Path, labels: int, options: dict[str, Any]):
    with pytest.raises(RewardError, match=r"leave label out|label must be one of"):
        actor(save(tmp_path / "m", labels=labels), **options)
