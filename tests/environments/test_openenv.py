"""The OpenEnv adapter. CI speaks to a server that answers as OpenEnv documents its protocol; with
``FORGE_OPENENV_PYTHON`` (a Python that has the package ``openenv``) the same tests speak to a real one too."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from forge_core.config import ConfigError, load_config
from forge_core.environments.openenv import OpenEnv, ServerError, prompts
from forge_core.environments.protocol import Action, Task
from forge_core.environments.resolve import check_environment
from tests.environments.scripted import Policy, episodes_of, play

REAL = os.environ.get("FORGE_OPENENV_PYTHON")


class Documented:
    """The game of ``openenv_server.py``, behind the protocol; two sessions at a time."""

    def __init__(self) -> None:
        self._sessions = 0

    def __call__(self, connection: ServerConnection) -> None:
        if self._sessions == 2:
            return
        self._sessions += 1
        number = 0
        for text in connection:
            message = json.loads(text)
            if message["type"] == "reset":
                number = message["data"]["seed"] % 10
                answer = _observation(f"Game {message['data']['seed']}: which digit?")
            else:
                answer = _answer(number, str(message["data"]["guess"]))
            connection.send(json.dumps(answer))
        self._sessions -= 1


def _observation(text: str, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    data = {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def _answer(number: int, guess: str) -> dict[str, Any]:
    if not guess.isdigit():
        return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}}
    if guess == "13":
        return {"type": "error", "data": {"message": "the game is gone", "code": "EXECUTION_ERROR"}}
    if int(guess) == number:
        return _observation("yes", 1.0, True)
    return _observation("higher" if int(guess) < number else "lower", -0.1)


@pytest.fixture(scope="module")
def documented() -> Iterator[str]:
    with serve(Documented(), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    if REAL is None:
        pytest.skip("FORGE_OPENENV_PYTHON names no Python with the package openenv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([REAL, str(Path(__file__).with_name("openenv_server.py")), str(port)])
    while server.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait()


@pytest.fixture(params=["documented", "real"])
def url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def task(seed: int, prompt: str | None = None) -> Task:
    said = prompt or f"Game {seed}: which digit?"
    return Task([{"role": "user", "content": said}], None, {"seed": seed}, 0)


def test_the_prompts_are_what_the_server_says_first(url: str):
    rows = prompts(url, size=3, observation="text", seed=5)
    assert rows == [{"prompt": f"Game {seed}: which digit?", "seed": seed} for seed in (5, 6, 7)]


def test_an_episode_is_a_session_of_the_server(url: str):
    game = OpenEnv(url, action="guess", observation="text")
    game.reset(task(7))
    low, refused, found = (game.step(Action(text)) for text in ("3", "hm", "7"))
    assert (low.observation[0]["content"], low.reward, low.done) == ("higher", -0.1, False)
    assert (refused.observation[0]["content"], dict(refused.counts)) == (
        "error: this is no valid guess",
        {"invalid_moves": 1},
    )
    assert (list(found.observation), found.reward, found.done) == ([], 1.0, True)
    game.close()


def test_without_a_field_the_policy_reads_the_whole_observation(url: str):
    (row,) = prompts(url, size=1, seed=4)
    assert json.loads(row["prompt"]) == {"text": "Game 4: which digit?"}


def test_another_server_than_that_of_the_prompts_is_refused(url: str):
    game = OpenEnv(url, action="guess", observation="text")
    with pytest.raises(ValueError, match="the server begins with 'Game 7: which digit\\?', unlike the prompt"):
        game.reset(task(7, "Game 8: which digit?"))
    game.close()


def test_an_error_of_the_environment_is_no_observation(url: str):
    game = OpenEnv(url, action="guess")
    with pytest.raises(ValueError, match="unlike the prompt"):
        game.reset(task(7))
    with pytest.raises(ServerError, match="EXECUTION_ERROR: the game is gone"):
        game.step(Action("13"))
    game.close()


def test_no_more_sessions_are_open_than_max_open_says(url: str):
    policy = Policy(lambda text: "3")
    how = play(lambda: OpenEnv(url, action="guess", observation="text"), max_turns=2, max_open=2, workers=8)
    tasks = {str(seed): task(seed) for seed in range(6)}
    done = episodes_of(policy, tasks, how)
    assert {name: c.metadata["dropped"] for name, c in done.items()} == dict.fromkeys(tasks)
    assert done["3"].metadata["environment"]["reward"] == 1.0


def test_a_server_that_is_full_is_named_as_the_reason(url: str):
    games = [OpenEnv(url, action="guess", observation="text") for _ in range(3)]
    for game in games[:2]:
        game.reset(task(1))
    with pytest.raises(Exception, match=r"environment.max_open|CAPACITY_REACHED"):
        games[2].reset(task(1))
    for game in games:
        game.close()


def test_a_wrong_address_is_refused_before_the_run():
    config = load_config(
        {"model": {"vocabulary": "01"}, "environment": {"path": "openenv", "options": {"url": "host"}}}
    )
    with pytest.raises(ConfigError, match="url: is 'host': must be the address of an OpenEnv server"):
        check_environment(config)
