"""Messages, templates, prompt ids and holding out."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.config.data_sections import DatasetSection
from forge_core.data import DataError, PromptSet, check_dataset, load_prompts, split_holdout
from forge_core.data.layouts import Layout
from forge_core.data.sources import Source

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


@pytest.fixture
def load(tmp_path: Path):
    def load_rows(rows: list[dict], **fields) -> PromptSet:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_prompts(DatasetSection(path=str(path), **fields), seed=0)

    return load_rows


def test_template_and_system_prompt_are_applied_to_text(load):
    prompt = load([{"prompt": "2+2?"}], prompt_template=r"Q: {prompt} Use \boxed{}.", system_prompt="Think.")[0]
    assert prompt.messages == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": r"Q: 2+2? Use \boxed{}."},
    ]


def test_template_is_applied_to_the_last_message_of_a_chat_and_the_system_prompt_replaces_its_own(load):
    prompt = load([{"prompt": CHAT}], prompt_template="{prompt}!", system_prompt="Think.")[0]
    assert prompt.messages == [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+2?!"}]
    assert load([{"prompt": CHAT}])[0].messages == CHAT


def test_a_chat_that_ends_with_a_reply_has_it_as_target(load):
    reply = {"role": "assistant", "content": "4"}
    prompt = load([{"messages": [*CHAT, reply]}])[0]
    assert (prompt.messages, prompt.target) == (CHAT, "4")
    assert load([{"messages": [*CHAT, reply], "answer": "four"}])[0].target == "four"


def test_a_template_without_the_prompt_is_refused(load):
    with pytest.raises(DataError, match=r"dataset\.prompt_template: 'Solve it' does not hold \{prompt\}"):
        load([{"prompt": "a"}], prompt_template="Solve it")
    with pytest.raises(DataError, match=r"dataset\.prompt_template"):
        check_dataset(DatasetSection(path="reasoning_gym://chain_sum", prompt_template="Solve it"))


@pytest.mark.parametrize(
    "cell", [None, "", [], [{"role": "user"}], ["hello"], [{"role": "assistant", "content": "4"}], {"a": 1}]
)
def test_a_row_without_a_usable_prompt_is_named(load, cell):
    prompts = load([{"prompt": "fine"}, {"prompt": cell}])
    with pytest.raises(DataError, match=r"dataset\.prompt_column: row 1, column 'prompt'"):
        prompts[1]
    with pytest.raises(DataError, match="row 1"):
        split_holdout(prompts, 0.1)


def test_structured_answers_become_json_and_numbers_text(load):
    rows = [{"prompt": "a", "answer": {"b": [1, 2]}}, {"prompt": "b", "answer": 3.5}, {"prompt": "c", "answer": None}]
    assert [p.target for p in load(rows)] == ['{"b": [1, 2]}', "3.5", None]


def test_equal_messages_have_one_prompt_id_whatever_their_row_or_source(load, tmp_path: Path):
    prompts = load([{"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"prompt": "a", "answer": "2"}])
    ids = [p.prompt_id for p in prompts]
    assert ids[0] == ids[2] != ids[1]
    assert ids == prompts.prompt_ids
    assert len(ids[0]) == 16
    assert load([{"problem": [{"content": "a", "role": "user", "name": "x"}]}])[0].prompt_id == ids[0]
    assert load([{"prompt": "a"}], system_prompt="s")[0].prompt_id != ids[0]


def test_prompt_ids_never_change_between_releases(load):
    assert load([{"prompt": "s:47120="}])[0].prompt_id == "589af8b674b310fc"


def test_which_prompts_are_held_out_never_changes_between_processes_and_releases(load):
    prompts = load([{"prompt": f"question {i}"} for i in range(40)])
    assert split_holdout(prompts, 0.2)[1] == [6, 19, 21, 22, 25]


def test_duplicates_are_held_out_together(load):
    texts = [f"question {i % 200}" for i in range(1000)]
    random.Random(0).shuffle(texts)
    prompts = load([{"prompt": text} for text in texts])
    train, heldout = split_holdout(prompts, 0.3)
    assert sorted(train + heldout) == list(range(1000))
    assert train == sorted(train)
    assert heldout == sorted(heldout)
    assert not {texts[row] for row in train} & {texts[row] for row in heldout}
    assert 0.2 < len(heldout) / 1000 < 0.4


def test_a_larger_share_holds_out_the_same_prompts_and_more(load):
    prompts = load([{"prompt": f"question {i}"} for i in range(500)])
    small, large = (set(split_holdout(prompts, share)[1]) for share in (0.1, 0.4))
    assert small < large
    assert split_holdout(prompts, 0.0) == (list(range(500)), [])


def test_holding_out_does_not_depend_on_order(load):
    texts = [f"question {i}" for i in range(300)]
    held = [
        {p[row].messages[0]["content"] for row in split_holdout(p, 0.2)[1]}
        for p in (load([{"prompt": text} for text in order]) for order in (texts, texts[::-1]))
    ]
    assert held[0] == held[1] != set()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_prompt_never_moves_between_train_and_test_when_data_grow_or_are_reordered(data):
    """Whatever is added, removed or repeated, and in whatever order, the side of each prompt is what it was."""
    texts = data.draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=20))
    later = data.draw(st.permutations(texts + data.draw(st.lists(st.text(min_size=1, max_size=8), max_size=20))))
    share = data.draw(st.floats(0, 0.99))
    before, after = sides(texts, share), sides(later[: data.draw(st.integers(1, len(later)))], share)
    assert all(before[text] == after[text] for text in before.keys() & after.keys())


def sides(texts: list[str], share: float) -> dict[str, bool]:
    """Whether each text is held out."""
    source = Source([{"prompt": text} for text in texts], ["prompt"], "t")
    prompts = PromptSet(source, DatasetSection(path="x"), Layout("prompt", None), "dataset")
    train, held = split_holdout(prompts, share)
    assert sorted(train + held) == list(range(len(texts)))
    found = {texts[row]: False for row in train}
    assert not found.keys() & {texts[row] for row in held}
    return found | {texts[row]: True for row in held}
