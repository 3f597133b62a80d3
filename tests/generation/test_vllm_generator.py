"""The vLLM generator on a CPU, with real engines: parity, swaps of weights and their traps, deaths and restarts.

One engine serves most tests (starting one takes 10 to 25 s); those that kill engines start their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from forge_core.data_model import Completion, GenerationRequest, SamplingParams
from forge_core.devices import Placement
from forge_core.environments.protocol import Task
from forge_core.environments.rollout import Play, run_episodes
from forge_core.environments.turns import TurnRenderer
from forge_core.generation.hf import HFGenerator
from forge_core.generation.vllm import VLLMGenerator, version_spans
from forge_core.generation.vllm_open import Open, finished, sampling_params
from forge_core.generation.vllm_settings import VLLMSettings
from forge_core.generation.vllm_slots import RESERVED
from forge_core.models import probe
from forge_core.models.errors import WeightsError
from forge_core.observability.memory import OutOfMemory
from forge_core.processes.guard import mapped, shared_files
from forge_core.stop import Stopped, StopToken
from forge_core.store import CorruptObject, open_store
from forge_core.store.manifest import folder_files
from forge_core.weights.host_cache import lease_published
from tests.environments.games import Turns
from tests.generation.conftest import make_folder, request

pytestmark = pytest.mark.engine
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_heads": 2, "num_kv_heads": 1}
LENGTH = 2048  # room for responses that outlast a test on any machine
SLOTS = 16
EXACT = 1e-4  # float32 log-probabilities of two engines, in nats


class Versions:
    """Model folders by policy version: different weights, a tied output matrix."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, version: int) -> Path:
        folder = self.root / str(version)
        if not folder.exists():
            make_folder(folder, seed=version, max_position_embeddings=LENGTH, **SHAPE)
        return folder


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tmp_path_factory.mktemp("versions"))


def settings(**changes) -> VLLMSettings:
    args = {"max_num_seqs": SLOTS, "enable_prefix_caching": True, "block_size": 32}
    return dataclasses.replace(VLLMSettings(max_model_len=LENGTH, engine_args=args, threads=1), **changes)


@pytest.fixture(scope="module")
def engine(versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMGenerator]:
    logs = tmp_path_factory.mktemp("logs")
    generator = VLLMGenerator(versions, version=0, settings=settings(), logs=logs)
    yield generator
    generator.shutdown()


@pytest.fixture
def endless(engine: VLLMGenerator, monkeypatch: pytest.MonkeyPatch) -> VLLMGenerator:
    """The engine, with responses that run to their limit."""
    monkeypatch.setattr(
        engine, "_settings", dataclasses.replace(engine._settings, sampling_params={"ignore_eos": True})
    )
    return engine


def next_version(engine: VLLMGenerator) -> int:
    return engine.get_version() + 1


def many(count: int, tokens: int, *, batch: int = 0, seed: int = 0, text: str = "12+3") -> list[GenerationRequest]:
    sampling = SamplingParams(max_new_tokens=tokens)
    ids = request(text).prompt_ids
    return [GenerationRequest(f"{batch}/{seed}/{i}", ids, seed + i, sampling, batch) for i in range(count)]


def transformers_logprobs(folder: Path, token_ids: list[int]) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1).tolist()


def publish_probe(folder: Path, of: Path) -> None:
    """Put into ``folder`` what the weights of another folder compute."""
    token_ids = probe.sequences(21, LENGTH)
    probe.write(folder, token_ids, [transformers_logprobs(of, ids) for ids in token_ids], "float32")


def distance(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def in_background(work: Callable[[], list[Completion]]) -> tuple[threading.Thread, list[list[Completion]]]:
    results: list[list[Completion]] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


@contextmanager
def running(engine: VLLMGenerator, requests: list[GenerationRequest]) -> Iterator[None]:
    """``requests`` run while the body does, and are ended with it."""
    stop = StopToken()

    def generate() -> None:
        with suppress(Stopped):
            engine.generate(requests, stop=stop)

    thread = threading.Thread(target=generate)
    thread.start()
    running_tokens(engine)
    try:
        yield
    finally:
        stop.set("the test is over")
        thread.join()


def running_tokens(engine: VLLMGenerator) -> None:
    """Wait until the engine has sampled some tokens."""
    deadline = time.monotonic() + 30
    while not engine._assigned:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.4)
    engine.score(list(request("12+3=").prompt_ids))  # answered with the next step, which is one of the others too


# Parity -----------------------------------------------------------------------------------------------------------


def test_sampled_logprobs_equal_transformers(engine: VLLMGenerator, versions: Versions) -> None:
    folder = versions(engine.get_version())
    for completion in engine.generate([request("12+3", seed=s, max_new_tokens=40) for s in range(4)]):
        prompt = completion.metadata["prompt_ids"]
        expected = transformers_logprobs(folder, prompt + completion.token_ids)[len(prompt) - 1 :]
        assert distance(completion.logprobs, expected) < EXACT


def test_logprobs_are_those_of_the_temperature(engine: VLLMGenerator, versions: Versions) -> None:
    (completion,) = engine.generate([request("12+3", temperature=0.5, max_new_tokens=30)])
    prompt = completion.metadata["prompt_ids"]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(versions(engine.get_version()), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / 0.5, -1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
    assert distance(completion.logprobs, expected.tolist()) < EXACT


def test_greedy_tokens_equal_transformers_and_the_trainer(engine: VLLMGenerator, versions: Versions) -> None:
    from forge_core.reference.model import ReferenceModel

    folder = versions(engine.get_version())
    requests = [request(text, temperature=0.0, max_new_tokens=16) for text in ("12+3", "9,8,7:", "0=", "44+55=")]
    embedded = HFGenerator(lambda version: folder, version=0)
    ours, theirs = engine.generate(requests), embedded.generate(requests)
    embedded.shutdown()
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    trainer = ReferenceModel(folder, token_budget=LENGTH, seq_len=LENGTH)
    trainer.setup()
    samples = [(c.metadata["prompt_ids"], c.token_ids) for c in ours]
    for completion, logprobs in zip(ours, trainer.forward(samples), strict=True):
        assert distance(completion.logprobs, logprobs) < EXACT
    vocabulary = range(21)  # greedy in the trainer too: no other token is likelier than the chosen one
    for prompt, response in samples:
        for t in range(len(response)):
            found = trainer.forward([(prompt + response[:t], [token]) for token in vocabulary])
            assert max(vocabulary, key=lambda token: found[token][0]) == response[t]


def test_turns_of_an_episode_are_sampled_after_all_tokens_before_them(engine: VLLMGenerator, versions: Versions):
    tokenizer = AutoTokenizer.from_pretrained(versions(0))
    renderer = TurnRenderer(tokenizer, None, ())
    play = Play(Turns, renderer, lambda text: (), 3, 4, 30.0, 8, concurrent=True)
    asked = [
        dataclasses.replace(request(text, seed, max_new_tokens=30), request_id=f"{text}{seed}")
        for text in ("12", "3+4")
        for seed in (0, 1)
    ]
    tasks = {r.request_id: Task([{"role": "user", "content": "12"}], None, {}, 0) for r in asked}
    for completion in run_episodes(play, engine, asked, tasks):
        mask, ids = completion.metadata["response_mask"], completion.token_ids
        assert mask.count(False) == 2, "what the environment said after the first two turns"
        computed = transformers_logprobs(versions(0), [*completion.metadata["prompt_ids"], *ids])[-len(ids) :]
        sampled = [(p, q) for p, q, own in zip(completion.logprobs, computed, mask, strict=True) if own]
        assert max(abs(p - q) for p, q in sampled) < EXACT


def test_prompts_that_do_not_fit_in_one_step_of_the_engine_are_sampled_with_their_seeds(engine: VLLMGenerator) -> None:
    """vLLM's engine ended on a CPU when it took such a prompt in parts."""
    texts = [f"{i:02}+" * 500 for i in range(SLOTS)]  # 24,000 tokens; a step takes a few thousand
    long = [r for i, text in enumerate(texts) for r in many(1, 2, seed=i, text=text)]
    together = {c.metadata["request_id"]: c.token_ids for c in engine.generate(long)}
    assert [together[r.request_id] for r in long] == [engine.generate([r])[0].token_ids for r in long]


def test_a_request_is_a_function_of_its_seed(engine: VLLMGenerator) -> None:
    alone = engine.generate([request("12+3", seed=5, max_new_tokens=30)])
    crowd = engine.generate([request("12+3", seed=s, max_new_tokens=30) for s in range(10)])
    assert crowd[5].token_ids == alone[0].token_ids
    assert len({tuple(c.token_ids) for c in crowd}) > 5


def test_a_response_ends_at_the_eos_token(engine: VLLMGenerator) -> None:
    completions = engine.generate([request("12+3", seed=s, max_new_tokens=LENGTH - 10) for s in range(8)])
    stopped = [c for c in completions if c.metadata["finish_reason"] == "stop"]
    assert stopped
    assert all(c.token_ids[-1] == engine.tokenizer.eos_token_id for c in stopped)
    assert all(len(c.token_ids) == len(c.logprobs) for c in completions)


# Requests ---------------------------------------------------------------------------------------------------------


def test_too_long_requests_are_refused_before_submission(engine: VLLMGenerator) -> None:
    with pytest.raises(ValueError, match=f"more than the model's {LENGTH} positions"):
        engine.generate([request("12+3", max_new_tokens=LENGTH)])


def test_work_that_the_bound_forbids_is_refused(engine: VLLMGenerator) -> None:
    newer = dataclasses.replace(request("12+3"), min_version=next_version(engine))
    with pytest.raises(ValueError, match="update the weights first"):
        engine.generate([newer])


@pytest.mark.parametrize(
    "given", [{"stop": 5}, {"repetition_detection": {"max_pattern_size": 2}}, {"repetition_penalty": -1.0}]
)
def test_what_vllm_cannot_take_is_the_answer_to_that_request_alone(
    endless: VLLMGenerator, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    before = list(endless._pool.live().values())
    with running(endless, many(4, 1000)), monkeypatch.context() as patch:
        patch.setattr(endless, "_settings", dataclasses.replace(endless._settings, sampling_params=given))
        with pytest.raises(ValueError, match=r"request 12\+3/0: "):
            endless.generate([request("12+3")])
    assert len(endless.generate([request("12+3")])) == 1
    assert list(endless._pool.live().values()) == before


def test_a_response_that_repeats_itself_is_cut_short(engine: VLLMGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"ignore_eos": True, "repetition_detection": {"max_pattern_size": 8, "min_count": 2}}
    monkeypatch.setattr(engine, "_settings", dataclasses.replace(engine._settings, sampling_params=given))
    (completion,) = engine.generate([request("12+3", max_new_tokens=1000)])
    assert 0 < len(completion.token_ids) < 1000
    assert completion.metadata["finish_reason"] == "length"


def test_tokens_that_cannot_be_scored_are_refused_and_the_engine_goes_on(engine: VLLMGenerator) -> None:
    before = list(engine._pool.live().values())
    for tokens, problem in [
        ([], "the prompt has no token"),
        ([5] * LENGTH, f"more than the model's {LENGTH} positions"),
        ([5, 21], "the vocabulary has 21 tokens"),
    ]:
        with pytest.raises(ValueError, match=problem):
            engine.score(tokens)
    with pytest.raises(ValueError, match="score: "):
        engine._answer("score", token_ids=[5] * LENGTH)  # what only vLLM refuses
    assert engine.score([5]) == []
    assert len(engine.score([5] * (LENGTH - 1))) == LENGTH - 2
    assert list(engine._pool.live().values()) == before


def test_a_stop_ends_the_call_and_frees_the_engine(endless: VLLMGenerator) -> None:
    stop = StopToken()
    threading.Timer(0.3, stop.set, ["test"]).start()
    started = time.monotonic()
    with pytest.raises(Stopped):
        endless.generate(many(64, 2000), stop=stop)
    assert time.monotonic() - started < 3
    started = time.monotonic()
    endless.generate([request("12+3", max_new_tokens=5)])
    assert time.monotonic() - started < 3  # the 64 are gone


def test_what_was_given_up_is_not_taken_for_what_is_asked_for_again(endless: VLLMGenerator) -> None:
    requests = many(SLOTS, 60)
    for attempt in range(4):
        stop = StopToken()
        threading.Timer(0.1 + 0.05 * attempt, stop.set, ["test"]).start()
        with suppress(Stopped):
            endless.generate(requests, stop=stop)
        again = endless.generate(requests)
        assert {(c.metadata["finish_reason"], len(c.token_ids)) for c in again} == {("length", 60)}


def test_at_the_deadline_unfinished_requests_come_back_as_they_are(endless: VLLMGenerator) -> None:
    completions = endless.generate(many(3 * SLOTS, 2000), deadline_s=1.0)
    reasons = [c.metadata["finish_reason"] for c in completions]
    assert set(reasons) == {"aborted"}
    lengths = [len(c.token_ids) for c in completions]
    assert 0 < max(lengths) < 2000  # what ran has its tokens
    assert min(lengths) == 0  # what waited has none


def test_older_batches_go_first(endless: VLLMGenerator) -> None:
    young, _ = in_background(lambda: endless.generate(many(4 * SLOTS, 300, batch=7)))
    running_tokens(endless)
    endless.generate(many(4, 20, batch=6))
    left = len(endless._assigned)  # of the younger batch: the older one waited for a slot, and not for its turn
    young.join()
    assert left > SLOTS


# Weights ----------------------------------------------------------------------------------------------------------


def test_an_update_serves_the_new_weights_and_not_the_old(engine: VLLMGenerator, versions: Versions) -> None:
    """Also for a tied output matrix, of which vLLM keeps a packed copy on the CPU, and for a cached prefix."""
    old, new = engine.get_version(), next_version(engine)
    tokens = list(request("1234567890" * 20 + "=").prompt_ids)  # several blocks of the prefix cache
    prompt = GenerationRequest("cached", tuple(tokens), 0, SamplingParams(max_new_tokens=24))
    engine.generate([prompt])  # cached under the old weights
    engine.update_weights(new)
    (after,) = engine.generate([prompt])
    everything = tokens + after.token_ids
    expected = transformers_logprobs(versions(new), everything)[len(tokens) - 1 :]
    stale = transformers_logprobs(versions(old), everything)[len(tokens) - 1 :]
    assert distance(after.logprobs, expected) < EXACT
    assert distance(after.logprobs, stale) > 0.1
    assert (after.metadata["policy_version"], engine.get_version()) == (new, new)


def test_a_running_response_goes_on_with_the_new_weights(endless: VLLMGenerator, versions: Versions) -> None:
    old, new = endless.get_version(), next_version(endless)
    length = 800
    thread, results = in_background(lambda: endless.generate(many(2 * SLOTS, length)))
    running_tokens(endless)
    endless.update_weights(new)
    thread.join()
    (completions,) = results
    crossed = [c for c in completions if len(c.metadata["version_spans"]) == 2]
    waited = [c for c in completions if c.metadata["policy_version"] == new]
    assert len(crossed) == SLOTS
    assert len(waited) == SLOTS
    for completion in crossed[:4]:
        first, second = completion.metadata["version_spans"]
        assert (first.version, first.start, second.version, second.end) == (old, 0, new, length)
        assert first.end == second.start
        prompt = completion.metadata["prompt_ids"]
        before = transformers_logprobs(versions(old), prompt + completion.token_ids)[len(prompt) - 1 :]
        assert distance(completion.logprobs[: first.end], before[: first.end]) < EXACT  # to the token: spans are exact
        assert abs(completion.logprobs[first.end] - before[first.end]) > EXACT
    prompt = waited[0].metadata["prompt_ids"]  # what had not begun is computed by the new weights alone
    expected = transformers_logprobs(versions(new), prompt + waited[0].token_ids)[len(prompt) - 1 :]
    assert distance(waited[0].logprobs, expected) < EXACT


def test_a_probe_waits_for_no_response_to_end(endless: VLLMGenerator, versions: Versions) -> None:
    new = next_version(endless)
    publish_probe(versions(new), of=versions(new))
    with running(endless, many(2 * SLOTS, 2000)):
        endless.update_weights(new)
        assert endless.last_update["probe"] > 0
        endless.score(list(request("12+3=").prompt_ids))
        assert len(endless._assigned) == 2 * SLOTS, "responses have ended: the probe may have waited for that"


def test_drain_finishes_what_runs_with_the_old_weights(endless: VLLMGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = endless.get_version(), next_version(endless)
    monkeypatch.setattr(endless._pool, "settings", dataclasses.replace(endless._settings, drain=True))
    thread, results = in_background(lambda: endless.generate(many(SLOTS, 600)))
    running_tokens(endless)
    endless.update_weights(new)
    thread.join()
    assert {s.version for c in results[0] for s in c.metadata["version_spans"]} == {old}
    assert endless.generate([request("1")])[0].metadata["policy_version"] == new


def test_versions_only_grow(engine: VLLMGenerator) -> None:
    served = engine.get_version()
    engine.update_weights(served)
    engine.update_weights(served + 1)
    with pytest.raises(ValueError, match="not newer"):
        engine.update_weights(served)


def _missing_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _other_shape(folder: Path) -> None:
    shutil.rmtree(folder)
    make_folder(folder, **{**SHAPE, "intermediate_size": 96})


def _half_written(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("spoil", [_missing_tensor, _other_shape, _half_written, _no_weights])
def test_weights_that_do_not_fit_are_refused_and_the_old_serve_on(
    engine: VLLMGenerator, versions: Versions, tmp_path: Path, spoil: Callable[[Path], None], monkeypatch
) -> None:
    """vLLM itself would load half of them and die at the next step."""
    served = engine.get_version()
    bad = shutil.copytree(versions(served + 1), tmp_path / "bad")
    spoil(bad)
    before = engine.score(list(request("12+3=").prompt_ids))
    monkeypatch.setattr(engine._pool, "weights", lambda version: bad)
    with pytest.raises(WeightsError):
        engine.update_weights(served + 1)
    assert engine.get_version() == served
    assert engine.score(list(request("12+3=").prompt_ids)) == before
    assert engine._pool._restarts == [0]


def test_a_byte_that_changed_in_the_store_is_refused_and_the_old_serve_on(
    engine: VLLMGenerator, versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, store = engine.get_version(), open_store(str(tmp_path / "store"))
    manifest = store.publish("new/", folder_files(versions(served + 1)), request="new")
    file = tmp_path / "store" / manifest.file("model.safetensors").key
    content = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = engine.score(list(request("12+3=").prompt_ids))
    monkeypatch.setattr(engine._pool, "weights", lambda version: lease_published(store, "new/").folder)
    with pytest.raises(CorruptObject, match=r"model-.*\.safetensors in the store .* is damaged"):
        engine.update_weights(served + 1)
    assert engine.get_version() == served
    assert engine.score(list(request("12+3=").prompt_ids)) == before
    file.write_bytes(content)
    engine.update_weights(served + 1)
    assert engine.get_version() == served + 1
    assert engine.score(list(request("12+3=").prompt_ids)) != before


def test_the_configuration_of_vllm_is_shown(engine: VLLMGenerator) -> None:
    config = engine.get_vllm_config()
    assert config["scheduler"]["max_num_seqs"] == SLOTS + RESERVED
    assert config["model"]["max_model_len"] == LENGTH


def test_run_serves_until_it_is_stopped(engine: VLLMGenerator) -> None:
    stop = StopToken()
    threading.Timer(0.3, stop.set, ["test"]).start()
    engine.run(stop)
    assert stop.is_set()


# Faults: these tests kill engines -----------------------------------------------------------------------------------


def test_an_engine_that_dies_asleep_takes_no_memory_before_it_is_woken(engine: VLLMGenerator) -> None:
    engine.sleep()  # on a CPU nothing is freed, but whose turn it is counts the same
    (replica,) = engine._pool.live().values()
    replica.group.kill()
    time.sleep(2.0)
    assert not engine._pool.live()
    assert not [p for p in psutil.Process().children(recursive=True) if "vllm_engine" in " ".join(p.cmdline())]
    engine.wake()
    assert engine.generate([request("1")])[0].metadata["policy_version"] == engine.get_version()


def test_a_stop_does_not_wait_for_an_engine_that_starts(versions: Versions, tmp_path: Path) -> None:
    stop = StopToken()
    threading.Timer(3.0, stop.set, ["Ctrl-C"]).start()
    started = time.monotonic()
    with pytest.raises(Stopped, match="Ctrl-C"):
        VLLMGenerator(versions, version=0, settings=settings(gpus=((), ())), logs=tmp_path, stop=stop)
    assert time.monotonic() - started < 8
    assert not [p for p in psutil.Process().children(recursive=True) if str(tmp_path) in str(p.open_files())]


def test_an_engine_that_gets_no_memory_says_what_and_which_settings(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1000000")  # GiB
    with pytest.raises(OutOfMemory) as caught:
        VLLMGenerator(versions, version=0, settings=settings(), logs=tmp_path)
    message = str(caught.value)
    assert message.startswith("generator: out of memory")
    assert "less than requested memory for kv (1000000.0 GiB)" in str(caught.value.__cause__)
    assert "machine: total" in message
    assert "generator.engine_args.max_num_seqs (lower)" in message


def test_no_engine_stays_behind_when_another_cannot_start(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[None] = []

    def environment(ids: Sequence[str]) -> dict[str, str]:
        given.append(None)
        while len(given) == 2 and not any("EngineCore" in log.read_text() for log in tmp_path.glob("vllm-*.log")):
            time.sleep(0.1)
        if len(given) == 2:
            raise OSError("no such device")
        return {}

    monkeypatch.setattr(Placement, "environment", staticmethod(environment))
    with pytest.raises(OSError, match="no such device"):
        VLLMGenerator(versions, version=0, settings=settings(gpus=((), ())), logs=tmp_path)
    logs = [str(path) for path in tmp_path.glob("vllm-*.log")]
    assert len(logs) == 1
    held = [p for p in psutil.Process().children(recursive=True) if any(f.path in logs for f in p.open_files())]
    assert not held


def engine_processes(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def core_of(family: list[psutil.Process]) -> psutil.Process:
    (core,) = [p for p in family if "EngineCore" in " ".join(p.cmdline()) or "EngineCore" in p.name()]
    return core


def test_faults_of_one_engine(versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed probe, then a core that dies in a swap: the engine comes back on the version due. 20 s a start."""
    folders = Versions(tmp_path / "own")
    generator = VLLMGenerator(
        folders, version=0, settings=settings(sampling_params={"ignore_eos": True}), logs=tmp_path
    )
    try:
        before = generator.score(list(request("12+3=").prompt_ids))
        tokens = list(request("12+3=").prompt_ids)
        publish_probe(folders(1), of=folders(2))  # the trainer meant other weights
        thread, results = in_background(lambda: generator.generate(many(4, 1000)))
        running_tokens(generator)
        with pytest.raises(WeightsError, match=r"probe of version 1 differ .* version 0 keeps serving"):
            generator.update_weights(1)
        thread.join()  # sampled again by the restarted engine
        assert {s.version for c in results[0] for s in c.metadata["version_spans"]} == {0}
        assert generator.score(tokens) == before
        publish_probe(folders(1), of=folders(1))
        generator.update_weights(1)
        thread, results = in_background(lambda: generator.generate(many(4, 1000)))
        running_tokens(generator)
        (replica,) = generator._pool.live().values()
        family = engine_processes(replica.group.pid)
        core = core_of(family)
        core.suspend()
        threading.Timer(2.0, core.kill).start()
        generator.update_weights(2)  # once the engine is back, which has begun with the requests again
        thread.join()
        versions_of = [[s.version for s in c.metadata["version_spans"]] for c in results[0]]
        assert [spans for spans in versions_of if spans not in ([1], [2], [1, 2])] == []
        assert generator.score(tokens) == pytest.approx(transformers_logprobs(folders(2), tokens), abs=1e-4)
        psutil.wait_procs(family, timeout=10)
        assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        (replica,) = generator._pool.live().values()
        with monkeypatch.context() as patch:
            patch.setattr(replica.group, "kill", lambda: None)  # the owner is as dead as the others
            kill_all_but_the_core(replica.group._guard.pid)
    finally:
        generator.shutdown()


def kill_all_but_the_core(guard: int) -> None:
    """As ``pkill -9 -f forge`` does: the guard cannot act, and the core, whose title has no such word, is not hit."""
    family = engine_processes(guard)
    core = core_of(family)
    memory = mapped([process.pid for process in family])
    segments = [path for key, path in shared_files().items() if key in memory]
    others = [p for p in family if "forge_core" in " ".join(p.cmdline()) and p != core]
    assert len(others) == 2
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in others:
            process.send_signal(number)
    psutil.wait_procs([core], timeout=10)
    assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE
    for path in segments:  # nobody is left to do it
        Path(path).unlink(missing_ok=True)


def test_two_engines_and_a_killed_owner(tmp_path: Path) -> None:
    """Requests are divided; a killed engine's are sampled by the other; nothing survives a killed owner. (40 s)"""
    report = tmp_path / "report.json"
    owner = subprocess.Popen([sys.executable, "-m", "tests.generation.vllm_owner", str(tmp_path), str(report)])
    try:
        deadline = time.monotonic() + 400  # three starts of an engine
        while not report.exists():
            assert time.monotonic() < deadline
            assert owner.poll() is None, (tmp_path / "vllm-0.log").read_text()[-2000:]
            time.sleep(0.1)
        found = json.loads(report.read_text())
        assert found["divided"] == [16, 16]
        assert found["prompts_apart"] == 0
        assert found["completed"] == 32
        assert found["restarted"]
        family = psutil.Process(owner.pid).children(recursive=True)
        assert len(family) > 4
        memory, files = mapped([process.pid for process in family]), shared_files()
        segments = [path for key, path in files.items() if key in memory]
        assert segments, "vLLM's queues lie in shared memory"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
        assert not [path for path in segments if Path(path).exists()]
    finally:
        if owner.poll() is None:
            os.kill(owner.pid, signal.SIGKILL)


# Small parts --------------------------------------------------------------------------------------------------------


def test_settings_that_a_file_cannot_write_as_vllm_wants_them_are_made_for_it() -> None:
    from vllm.sampling_params import RepetitionDetectionParams

    made = sampling_params({"logit_bias": {"5": 1.5}, "repetition_detection": {"max_pattern_size": 2, "min_count": 3}})
    assert made.logit_bias == {5: 1.5}
    assert made.repetition_detection == RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    assert sampling_params({"logit_bias": None, "structured_outputs": None}).structured_outputs is None


def test_an_answer_to_another_prompt_is_refused() -> None:
    sequence = SimpleNamespace(token_ids=[], logprobs=[], finish_reason="stop")
    asked = Open({"id": "a", "prompt_ids": [5, 6]})
    told = [finished(asked, SimpleNamespace(prompt_token_ids=ids, outputs=[sequence])) for ids in ([5, 6], [6])]
    assert ["refused" in result for result in told] == [False, True]


def test_version_spans() -> None:
    assert version_spans([], 0) == version_spans([(3, 0)], 0) == []
    spans = version_spans([(3, 0), (4, 5), (5, 5), (6, 9)], 9)
    assert [(s.version, s.start, s.end) for s in spans] == [(3, 0, 5), (5, 5, 9)]
