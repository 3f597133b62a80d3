"""What a run learns from: data sets, and models made on the spot with their warm start."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from forge_core.config.section import Positive, Section


class ScratchModel(Section):
    """A small model made on the spot, with random weights and a character tokenizer."""

    architecture: Literal["qwen3", "llama"] = Field("qwen3", description="Architecture of the transformer.")
    vocabulary: str = Field(description="The characters of the tokenizer, one token each (besides <pad> and <eos>).")
    hidden_size: Positive = Field(128, description="Width of the model.")
    intermediate_size: Positive = Field(384, description="Width of the feed-forward layers.")
    num_layers: Positive = Field(2, description="Number of transformer layers.")
    num_heads: Positive = Field(4, description="Attention heads.")
    num_kv_heads: Positive = Field(2, description="Key/value heads (grouped-query attention).")
    head_dim: Positive = Field(32, description="Width of one attention head.")
    max_position_embeddings: Positive = Field(256, description="Longest sequence, in tokens.")
    tie_word_embeddings: bool = Field(True, description="Whether input and output embeddings are one matrix.")
    initializer_range: float = Field(0.05, gt=0, description="Standard deviation of the initial weights.")


class CurriculumSection(Section):
    column: str = Field(
        description="Column (or dotted path into one) that states how hard a prompt is: a number, or text with one in "
        "it, such as Level 3."
    )
    descending: bool = Field(False, description="Larger numbers are easier, as of a pass rate.")
    levels: Positive = Field(10, description="Levels of difficulty, at most: of equal size, or one for each number.")
    epochs: Positive = Field(1, description="Epochs that go from easy to hard; later ones visit prompts in any order.")


class DatasetSection(Section):
    path: str = Field(
        description="Where prompts come from: a hub id (org/name or hf://org/name), a local JSONL, Parquet, CSV or "
        "dataset folder, a pattern of such files (data/*.jsonl), reasoning_gym://<task>, or python://<module or "
        "file.py>:<function>."
    )
    name: str | None = Field(None, description="Configuration name of a hub data set.")
    split: str = Field("train", description="Split to train on.")
    streaming: bool = Field(False, description="Stream a hub data set instead of downloading it first.")
    revision: str | None = Field(None, description="Revision of a hub data set.")
    options: dict[str, Any] = Field(
        {},
        description="Arguments of a reasoning_gym task or a python:// function. Of a pattern: files, the list of those "
        "to read (left out: all that match).",
    )
    prompt_column: str | None = Field(None, description="Column of the prompt (text or chat messages).")
    answer_column: str | None = Field(None, description="Column of the ground truth.")
    system_prompt: str | None = Field(None, description="System message put before each prompt.")
    prompt_template: str = Field("{prompt}", description="Text of the user message; {prompt} is the prompt column.")
    chat_template: bool | None = Field(
        None, description="Apply the tokenizer's chat template. Left out: exactly when the tokenizer has one."
    )
    size: int | None = Field(None, ge=1, description="Use only the first rows. Left out: all.")
    shuffle: bool = Field(True, description="Visit prompts in a new seeded order each epoch.")
    curriculum: CurriculumSection | None = Field(None, description="Visit easy prompts first. Left out: in any order.")


class WarmStartSection(Section):
    """Supervised steps before version 0."""

    dataset: DatasetSection = Field(description="Demonstrations: prompt_column and answer_column are trained on.")
    steps: Positive = Field(300, description="Optimizer steps.")
    batch_size: Positive = Field(96, description="Demonstrations per step.")
    learning_rate: float = Field(2e-3, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(50, ge=0, description="Steps of linear warm-up, then cosine to 10 %.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
