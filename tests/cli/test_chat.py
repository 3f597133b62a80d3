"""``forge chat``: with a folder and with versions of a run, by lines on standard input and at a terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from forge_core.config import load_config
from forge_core.config.data_sections import ScratchModel
from forge_core.models.scratch import create
from forge_core.runs.record import create_run
from forge_core.stop import StopToken
from forge_core.store import Ledger, layout, open_store
from tests.cli.conftest import FORGE, Forge, Result
from tests.store.entries import RUN, committed, init_entry

pytestmark = pytest.mark.engine

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 64}
LETTERS = "abcdefghijklmnopqrstuvwxyz :\n"
GREEDY = ("--temperature", "0", "--max-new-tokens", "8")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without a chat template."""
    folder = tmp_path_factory.mktemp("plain")
    create(ScratchModel(vocabulary=LETTERS, **SMALL), 3, folder)
    return folder


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("templated")
    create(ScratchModel(vocabulary=LETTERS, **SMALL), 3, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def continued(folder: Path, prompt: str) -> str:
    """What transformers itself says is likeliest."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    found = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(found, skip_special_tokens=True))


@pytest.fixture
def said(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``forge chat`` with these lines on standard input."""

    def said(lines: str, *argv: str) -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return forge("chat", *argv)

    return said


def test_a_model_without_a_template_continues_each_line(said: Any, plain: Path):
    result = said("abc\n\nhello\n", str(plain), *GREEDY)
    assert (result.status, result.out) == (0, f"{continued(plain, 'abc')}\n{continued(plain, 'hello')}\n")
    assert "it has no chat template: it continues each text by itself" in result.err


def test_a_chat_model_sees_its_template_and_all_turns(said: Any, templated: Path):
    result = said("hello\nmore\n", str(templated), *GREEDY, "--system", "be kind")
    first = continued(templated, "s:be kind\nu:hello\na:")
    second = continued(templated, f"s:be kind\nu:hello\na:{first}\nu:more\na:")
    assert (result.status, result.out) == (0, f"{first}\n{second}\n")
    assert "it has no chat template" not in result.err


def test_the_oldest_turns_go_when_the_conversation_gets_too_long(said: Any, templated: Path):
    texts = ["one " + "a" * 14, "two " + "b" * 14, "three " + "c" * 14]
    answers = said("\n".join(texts) + "\n", str(templated), *GREEDY).out
    assert answers.endswith(f"{continued(templated, f'u:{texts[2]}{chr(10)}a:')}\n")
    result = said("a" * 80 + "\n", str(templated), *GREEDY)
    assert result.status == 2
    assert "this is 85 tokens long; the model takes 64" in result.err


def test_a_conversation_that_fits_is_not_forgotten_for_a_long_answer(templated: Path):
    from forge_core.generation.conversation import Conversation
    from forge_core.generation.hf import HFGenerator

    engine, shown = HFGenerator(lambda _: templated, version=0), list[int]()
    conversation = Conversation(engine, temperature=0.0, max_new_tokens=engine.max_positions)
    fitted = conversation._fitted

    def noted() -> tuple[list[int], int]:
        found = fitted()
        shown.append(len(conversation._turns))
        return found

    conversation._fitted = noted  # type: ignore[method-assign]
    stop = StopToken()
    conversation.answer("i am ada", lambda _: stop.set("enough"), stop)
    conversation.answer("who", lambda _: None, StopToken())
    engine.shutdown()
    assert shown == [1, 3], "the second answer is given in sight of the first two turns"


def test_tokens_come_one_by_one(plain: Path):
    from forge_core.data_model import GenerationRequest, SamplingParams
    from forge_core.generation.hf import HFGenerator

    engine = HFGenerator(lambda _: plain, version=0)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=12)
    request, seen = GenerationRequest("r", (3, 4, 5), 7, sampling), list[int]()
    streamed = engine.stream(request, seen.append)
    assert seen == streamed.token_ids
    assert engine.generate([request])[0].token_ids == seen, "the same as without looking"
    engine.shutdown()


def test_an_answer_that_is_stopped_is_what_has_come_and_the_conversation_goes_on(templated: Path):
    from forge_core.generation.conversation import Conversation
    from forge_core.generation.hf import HFGenerator

    engine, stop, pieces = HFGenerator(lambda _: templated, version=0), StopToken(), list[str]()
    conversation = Conversation(engine, temperature=0.0, max_new_tokens=8)

    def write(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            stop.set("enough")

    whole = continued(templated, "u:hello\na:")
    assert conversation.answer("hello", write, stop) == "".join(pieces) == whole[:2]
    assert len(whole) > 2
    again = continued(templated, f"u:hello\na:{whole[:2]}\nu:more\na:")
    assert conversation.answer("more", pieces.append, StopToken()) == again
    engine.shutdown()


@pytest.fixture
def run_of(folder: Path, plain: Path) -> None:
    """``./forge-store`` with a run of three versions after version 0, of which 0 and 3 have weights."""
    store = open_store("forge-store")
    create_run(store, load_config({"run": {"id": RUN}, "rewards": {"functions": [{"path": "exact_match"}]}}))
    ledger = committed(store, 3)
    for version in (0, 3):
        store.publish(ledger.weights_prefix(version), {f.name: f for f in plain.iterdir()}, request=f"v{version}")


@pytest.mark.usefixtures("run_of")
def test_any_version_of_a_run_can_be_talked_to(said: Any, plain: Path):
    newest = said("abc\n", RUN, *GREEDY)
    assert (newest.status, newest.out) == (0, f"{continued(plain, 'abc')}\n")
    assert f"model: version 3 of {RUN}" in newest.err
    assert f"model: version 0 of {RUN}" in said("abc\n", RUN, *GREEDY, "--version", "0").err


def test_the_production_model_can_be_talked_to(said: Any, forge: Forge, plain: Path):
    store, ledger = open_store("forge-store"), Ledger(open_store("forge-store"), RUN)
    create_run(store, load_config({"run": {"id": RUN}, "rewards": {"functions": [{"path": "exact_match"}]}}))
    made = store.publish(layout.weights(RUN, 0, "a0"), {f.name: f for f in plain.iterdir()}, request="v0")
    assert ledger.commit_init(init_entry(weights_digest=made.content))
    promoted = forge("promote", "letters", RUN, "--force")
    assert promoted.status == 0, promoted.err
    result = said("abc\n", "model://letters", *GREEDY)
    assert (result.status, result.out) == (0, f"{continued(plain, 'abc')}\n"), result.err
    assert f"model: version 0 of {RUN}" in result.err
    assert "is one version of a run" in said("abc\n", "model://letters", "--version", "0").err


@pytest.mark.usefixtures("run_of")
@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (("nobody",), "run 'nobody' does not exist in"),
        ((RUN, "--version", "9"), f"--version 9: run '{RUN}' has the versions 0 to 3"),
        ((RUN, "--version", "1"), "its weights were deleted; run 'run-1' still has those of the versions 0, 3"),
        (("./nothing",), "./nothing: there is no such folder"),
        (("forge-store",), "has no config.json"),
        ((RUN, "--temperature", "-1"), "--temperature -1.0: must be from 0"),
        ((RUN, "--system", "x"), "--system: the model's tokenizer has no chat template"),
    ],
)
def test_what_cannot_be_talked_to_is_said(said: Any, argv: tuple[str, ...], answer: str):
    result = said("abc\n", *argv)
    assert (result.status, result.out) == (2, "")
    assert answer in result.err


def test_a_folder_has_no_versions_and_unknown_characters_are_named(said: Any, plain: Path):
    assert "is a folder, which holds one model: leave it out" in said("abc\n", str(plain), "--version", "1").err
    result = said("ABC\n", str(plain))
    assert result.status == 2
    assert "['A', 'B', 'C']" in result.err


def test_at_a_terminal_one_types_and_ctrl_d_ends_it(plain: Path):
    ours, theirs = pty.openpty()
    command = [str(FORGE), "chat", str(plain), *GREEDY]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb"})
    os.close(theirs)
    read_until(ours, "> ")
    os.write(ours, b"ABC\n")
    assert "['A', 'B', 'C']" in read_until(ours, "> ")
    os.write(ours, b"abc\n")
    assert continued(plain, "abc").replace("\n", "\r\n") in read_until(ours, "> ")
    os.write(ours, b"\x04")
    assert process.wait(20) == 0
    os.close(ours)


def read_until(terminal: int, end: str) -> str:
    text, deadline = "", time.monotonic() + 90.0
    while not text.endswith(end):
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 1.0)[0]:
            text += os.read(terminal, 4096).decode()
    return text
