"""Several attempts at a task of reasoning-gym."""

from __future__ import annotations

from forge_core.config.data_sections import DatasetSection
from forge_core.data.prompts import load_prompts
from forge_core.environments.protocol import Action, Task
from forge_core.environments.reasoning_gym import ReasoningGymAttempts


def begun(**options: object) -> tuple[ReasoningGymAttempts, str]:
    section = DatasetSection(path="reasoning_gym://chain_sum", options={"size": 1})
    prompt = load_prompts(section, seed=3)[0]
    environment = ReasoningGymAttempts(**options)  # type: ignore[arg-type]
    environment.reset(Task(prompt.messages, prompt.target, prompt.metadata, 3))
    return environment, str(prompt.target)


def test_a_right_answer_ends_the_episode_with_the_verifiers_score():
    environment, answer = begun(extract="last_number")
    step = environment.step(Action(f"It is {answer}"))
    assert (step.done, step.reward, dict(step.counts)) == (True, 1.0, {"attempts": 1, "solved": True})


def test_a_wrong_answer_may_be_mended_for_less():
    environment, answer = begun(attempts=3, discount=0.5, again="No.")
    wrong = environment.step(Action(answer + "1"))
    assert (wrong.done, [m["content"] for m in wrong.observation]) == (False, ["No."])
    assert environment.step(Action(answer)).reward == 0.5


def test_the_last_attempt_ends_the_episode():
    environment, answer = begun(attempts=2)
    steps = [environment.step(Action(answer + "1")) for _ in range(2)]
    assert [step.done for step in steps] == [False, True]
    assert steps[1].counts["solved"] == 0
