"""A trained reward model grades the response: a Hugging Face sequence classifier, in batches, in this process.

Guarantees:
- Only safetensors are read, and no code of the folder is run.
- A text that is longer than the model can read is an error of its item, never cut: a cut one has another reward.
- The reward does not depend on the order of the items, and on their batches only by rounding.
- The digest of the folder's files, not its path, is part of what identifies the reward.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_core.models.resolve import model_architecture, weight_files
from forge_core.observability.memory import SETTINGS, memory_guard
from forge_core.rewards.grading import Grading, RewardItem

if TYPE_CHECKING:
    from forge_core.stop import StopToken

_SUFFIX = "ForSequenceClassification"
_LONGEST = 1 << 20  # tokenizers without a limit say 10**30
_guarded = memory_guard("reward model", SETTINGS["reward model"])


class RewardModel:
    """The output of the classifier in the folder ``model`` for prompt and response, in the tokenizer's chat template
    where it has one, else one after the other.

    With one output, that number (``sigmoid``: as a probability); with several, the probability of the class ``label``.
    ``timeout_s``: seconds for one batch; when one takes longer, the rest of the call is not graded.
    """

    needs_answer = False
    decide_nothing = frozenset({"model", "batch_size", "device"})

    @_guarded
    def __init__(
        self,
        model: str,
        batch_size: int = 16,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
        label: int | None = None,
        sigmoid: bool = False,
        max_length: int | None = None,
        timeout_s: float = 30.0,
    ):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        folder = str(_checked(model))
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._model: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
        )
        self._model.to(device).eval()
        self._prepare_padding()
        self._pick = self._picker(label, sigmoid)
        self._batch_size, self._timeout_s, self._lock = batch_size, timeout_s, threading.Lock()
        readable = getattr(self._model.config, "max_position_embeddings", None) or _LONGEST
        self._longest = min(max_length or _LONGEST, readable, self._tokenizer.model_max_length)

    @staticmethod
    def check(model: str, **options: Any) -> None:
        """Raise what is wrong with the folder, without loading it."""
        _checked(model)

    @staticmethod
    def identity(options: dict[str, Any]) -> dict[str, Any]:
        """What the options do not say: which weights, tokenizer and template the folder holds."""
        return {"files": _digest(_checked(options["model"]))}

    def grade_many(
        self, items: Sequence[RewardItem], stop: StopToken | None = None
    ) -> tuple[list[Grading], dict[str, float]]:
        """See ``BatchReward``. Metric: ``tokens``, those that the model read."""
        with self._lock:
            return self._grade_many(items, stop)

    def close(self) -> None:
        """Nothing is held but memory."""

    @_guarded
    def _grade_many(
        self, items: Sequence[RewardItem], stop: StopToken | None
    ) -> tuple[list[Grading], dict[str, float]]:
        ids = [self._tokenizer(self._text(item), add_special_tokens=not self._is_chat)["input_ids"] for item in items]
        gradings = [
            Grading(None, "error", f"{len(one)} tokens, more than the {self._longest} that the reward model can read")
            for one in ids
        ]
        late, tokens = False, 0
        for batch in self._batches(ids):
            if stop is not None:
                stop.check()
            start = time.perf_counter()
            values = [None] * len(batch) if late else self._outputs([ids[i] for i in batch])
            seconds = time.perf_counter() - start
            tokens += 0 if late else sum(len(ids[i]) for i in batch)
            for i, value in zip(batch, values, strict=True):
                gradings[i] = self._grading(value, seconds / len(batch))
            late = late or seconds > self._timeout_s
        return gradings, {"tokens": float(tokens)}

    def _grading(self, value: float | None, seconds: float) -> Grading:
        if value is None:
            return Grading(None, "timeout", f"a batch before it took longer than timeout_s={self._timeout_s:g} s")
        return Grading(value, seconds=seconds)

    def _batches(self, ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Places of readable texts, those of like length together: the longest first, which needs the most memory."""
        order = sorted((i for i, one in enumerate(ids) if len(one) <= self._longest), key=lambda i: -len(ids[i]))
        for start in range(0, len(order), self._batch_size):
            yield order[start : start + self._batch_size]

    def _outputs(self, ids: list[list[int]]) -> list[float]:
        import torch

        padded = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(self._model.device)
        with torch.inference_mode():
            logits = self._model(**padded).logits.float()
        return self._pick(logits).tolist()

    def _text(self, item: RewardItem) -> str:
        if not self._is_chat:
            return item.prompt + item.completion
        messages = item.metadata.get("prompt_messages") or [{"role": "user", "content": item.prompt}]
        response = {"role": "assistant", "content": item.completion}
        return self._tokenizer.apply_chat_template([*messages, response], tokenize=False)

    @property
    def _is_chat(self) -> bool:
        return self._tokenizer.chat_template is not None

    def _prepare_padding(self) -> None:
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._tokenizer.padding_side = "right"
        if self._model.config.pad_token_id is None:  # decoders find the last token of a text by it
            self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def _picker(self, label: int | None, sigmoid: bool) -> Any:
        outputs = self._model.config.num_labels
        if outputs == 1 and label is None:
            return (lambda logits: logits[:, 0].sigmoid()) if sigmoid else (lambda logits: logits[:, 0])
        if outputs == 1 or label is None or sigmoid or label >= outputs:
            raise ValueError(
                f"the model has {outputs} outputs: label must be one of 0 to {outputs - 1}, without sigmoid"
                if outputs > 1
                else "the model has one output: leave label out"
            )
        return lambda logits: logits.softmax(-1)[:, label]


def _checked(model: str) -> Path:
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"model {model!r} is no folder with a config.json: name the folder of the reward model")
    architecture = model_architecture(folder)
    if not architecture.endswith(_SUFFIX):
        raise ValueError(f"{folder / 'config.json'}: architecture {architecture} is no ...{_SUFFIX}")
    missing = [file.name for file in weight_files(folder) if not file.exists()]
    if missing:
        raise ValueError(f"the folder {folder} lacks {', '.join(missing)}: only safetensors are read")
    return folder


def _digest(folder: Path) -> str:
    files = sorted(f for f in folder.iterdir() if f.suffix in (".json", ".safetensors", ".jinja", ".txt", ".model"))
    return _files_digest(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=16)  # it is asked for with every shard
def _files_digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    from forge_core.store.digests import data_digest

    digest = hashlib.sha256()
    for path, _, _ in files:
        digest.update(f"{path.name}\0{data_digest(path)[0]}\n".encode())
    return digest.hexdigest()
