"""Small tokenizers with the habits of real ones: byte-level BPE, control tokens, and templates that do as they like."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # a reply may hold these

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Replies before the last question lose their thinking; later ones have a thinking block, empty if need be.
THINKING = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif -%}{%- endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' -%}
  {%- set parts = m.content.split('</think>') -%}
  {%- set thought = m.reasoning_content or (parts[0].split('<think>')[-1] if parts | length > 1 else '') -%}
  {%- if loop.index0 > ns.last %}{{ '<think>\n' + thought.strip() + '\n</think>\n\n' }}{% endif -%}
  {{- parts[-1].strip() -}}
  {%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor -%}
{%- else %}{{ m.content }}{% endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
# Asks for a reply with an open thinking block, and drops the thinking of every reply that was given.
ASKS_FOR_THOUGHT = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
    "<|assistant|>{{ m.content.split('</think>')[-1] }}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# No text asks for a reply; a space stands around it.
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }} "
    "<|endoftext|>{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
TWICE = "{% for m in messages %}{{ m.content }}/{{ m.content }}<|im_end|>{% endfor %}"


@lru_cache
def tokenizer(template: str | None = None, eos: str = "<|im_end|>", bos: str | None = None) -> Any:
    """Its vocabulary is learned from this file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([str(__doc__), THINKING, BRACKETS, CHATML], trainer)
    backend.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    backend.add_tokens([AddedToken(token, special=False) for token in ADDED])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    made.chat_template = template
    return made
