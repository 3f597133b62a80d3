"""A server of the real OpenEnv package, run by a Python that has it: ``python openenv_server.py PORT``. It thinks of a
number, which the seed of ``reset`` decides, and counts guesses."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field


class Guess(Action):
    guess: int = Field(description="A number.")


class Answer(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._number, self._state = 0, State()

    def reset(self, seed=None, episode_id=None, **_):
        self._number = (seed or 0) % 10
        return Answer(text=f"Game {seed}: which digit?")

    def step(self, action, timeout_s=None, **_):
        if action.guess == 13:
            raise OSError("the game is gone")
        if action.guess == self._number:
            return Answer(text="yes", reward=1.0, done=True)
        return Answer(text="higher" if action.guess < self._number else "lower", reward=-0.1)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_app(Game, Guess, Answer, env_name="game", max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
