"""Stopping and deadlines, with a generation that would take a minute or more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from forge_core.generation.hf import HFGenerator
from forge_core.stop import Stopped, StopToken
from tests.generation.conftest import make_folder, request

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[HFGenerator]:
    folder = make_folder(tmp_path_factory.mktemp("long"), max_position_embeddings=20_000)
    engine = HFGenerator(lambda version: folder, version=0, threads=1)
    yield engine
    engine.shutdown()


def endless(engine: HFGenerator) -> list:
    """Greedy requests that run in a loop without EOS: hours of work."""
    text = next(t for t in "0123456789" if len(engine.generate([greedy(t, 300)])[0].token_ids) == 300)
    return [greedy(text, 19_000) for _ in range(256)]


def greedy(text: str, steps: int):
    return request(text, temperature=0.0, max_new_tokens=steps)


def test_a_stop_token_ends_a_long_generation_within_a_second(engine):
    requests, stop, set_at = endless(engine), StopToken(), []

    def set_soon() -> None:
        time.sleep(1.0)
        set_at.append(time.monotonic())
        stop.set("test")

    threading.Thread(target=set_soon).start()
    with pytest.raises(Stopped, match="test"):
        engine.generate(requests, stop=stop)
    assert time.monotonic() - set_at[0] < 1.0


def test_a_stop_token_reaches_a_queued_call_too(engine):
    requests, stop, errors = endless(engine), StopToken(), []

    def run() -> None:
        try:
            engine.generate(requests, stop=stop)
        except Stopped as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    stop.set("test")
    for thread in threads:
        thread.join(2.0)
    assert len(errors) == 3


def test_a_forward_pass_is_left_between_layers(engine):
    class SetAfterTwoLooks(StopToken):
        looks = 0

        def check(self) -> None:
            self.looks += 1
            if self.looks == 4:  # queue, start of decoding, before prefill, first layer
                self.set("inside")
            super().check()

    stop = SetAfterTwoLooks()
    with pytest.raises(Stopped, match="inside"):
        engine.generate([greedy("1", 5)], stop=stop)
    assert stop.looks == 4


def test_a_stopped_engine_goes_on_with_the_next_call(engine):
    expected = engine.generate([request("1", 3)])
    stop = StopToken()
    stop.set("test")
    with pytest.raises(Stopped):
        engine.generate([request("1", 3)], stop=stop)
    assert engine.generate([request("1", 3)]) == expected


def test_at_the_deadline_unfinished_requests_come_back_aborted(engine):
    requests = [*endless(engine), greedy("7", 1)]
    expected = engine.generate([greedy("7", 1)])[0]
    start = time.monotonic()
    completions = engine.generate(requests, deadline_s=0.7)
    assert time.monotonic() - start < 2.0
    assert completions[-1].token_ids == expected.token_ids
    assert completions[-1].metadata["finish_reason"] == expected.metadata["finish_reason"]
    for completion in completions[:-1]:
        assert completion.metadata["finish_reason"] == "aborted"
        assert len(completion.token_ids) == len(completion.logprobs) > 0
        assert completion.token_ids == completions[0].token_ids


def test_requests_behind_the_deadline_are_aborted_without_a_token(engine):
    completion = engine.generate([request("1")], deadline_s=0.0)[0]
    assert completion.metadata["finish_reason"] == "aborted"
    assert completion.token_ids == completion.logprobs == completion.metadata["version_spans"] == []
    assert completion.text == ""
