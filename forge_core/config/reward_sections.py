"""The elements of ``rewards.functions``: one model a built-in reward, told apart by ``name``, and one for your own.

Invariants:
- An element without a name is ``custom``: ``path`` names the reward, ``options`` are its arguments. A built-in reward
  can be written that way too: ``{path: math, options: {take: first}}``.
- The fields of a section are the arguments of its reward class, with the same defaults (a test compares them).
- A section holds no secret: a judge's key is named by its environment variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError, field_validator

from forge_core.config.section import Positive, Section, kind

_NAME = "Which reward."
_ANSWER = "The answer is metadata['answer'], the data set's answer column."
_COMMON = frozenset({"name", "path", "options", "weight", "timeout_s"})


class AnyReward(Section):
    weight: float = Field(1.0, description="Factor of this component in the reward.")
    timeout_s: float | None = Field(
        None,
        gt=0,
        description="Seconds for one grade of this reward (one request to a judge, one batch of a reward model). Left "
        "out: rewards.timeout_s.",
    )


class RewardFunction(AnyReward):
    """A reward by its path: the user's own, or a built-in one."""

    name: Literal["custom"] = Field("custom", description=_NAME)
    path: str = Field(description="<module>:<name>, <file.py>:<name>, or the name of a built-in reward.")
    options: dict[str, Any] = Field({}, description="Arguments of the reward class.")

    @property
    def members(self) -> list[RewardFunction | BuiltinReward]:
        """The rewards in an option ``verifiers``, as an ensemble has it: they name code of the configuration too."""
        verifiers = self.options.get("verifiers")
        return [found for one in verifiers if (found := _reward_in(one))] if isinstance(verifiers, list) else []


class BuiltinReward(AnyReward):
    """Base of the sections of built-in rewards, which are used as a path with options too."""

    name: str

    @property
    def path(self) -> str:
        return self.name

    @property
    def members(self) -> list[RewardFunction | BuiltinReward]:
        """The rewards that this one is made of."""
        return []

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the reward class that are not its defaults."""
        return {k: v for k, v in self.model_dump(exclude_defaults=True).items() if k not in _COMMON}


class ExactMatchSection(BuiltinReward):
    name: Literal["exact_match"] = Field(description=_NAME)
    require_eos: bool = Field(False, description="exact_match: only responses that the model ended itself.")
    normalize: bool = Field(False, description="exact_match: leave case, punctuation and English articles aside.")


class LastIntegerSection(BuiltinReward):
    name: Literal["last_integer"] = Field(description=_NAME)


class OverlongSection(BuiltinReward):
    name: Literal["overlong"] = Field(description=_NAME)
    max_tokens: Positive = Field(description="overlong: response tokens from which on the reward is -factor.")
    buffer: Positive = Field(description="overlong: tokens before max_tokens over which the reward falls from 0.")
    factor: float = Field(1.0, description="overlong: the largest punishment.")


class ReasoningGymSection(BuiltinReward):
    name: Literal["reasoning_gym"] = Field(description=_NAME)
    extract: Literal["all", "last_number", "answer_tag"] = Field(
        "all", description="reasoning_gym: what of the completion the task's verifier sees."
    )


class MathSection(BuiltinReward):
    name: Literal["math"] = Field(description=_NAME)
    extract: Literal["any", "answer_tag", "boxed"] = Field(
        "any",
        description="math: where the answer stands: in <answer> tags, in \\boxed{}, or (any) in a tag, else a box, "
        "else the text's own last expression.",
    )
    take: Literal["last", "first"] = Field("last", description="math: which of several tags or boxes is the answer.")
    tolerance: float = Field(1e-6, ge=0, description="math: largest difference of two plain numbers that are equal.")
    partial_credit: float = Field(
        0.0, description="math: reward of a wrong response with the right number elsewhere in its text."
    )


class ThinkingSection(BuiltinReward):
    name: Literal["thinking"] = Field(description=_NAME)
    partial_reward: float = Field(
        0.2, description="thinking: reward of a think tag without a thought in a whole block."
    )
    full_reward: float = Field(1.0, description="thinking: reward of a whole <think> block that is not empty.")


class FormatSection(BuiltinReward):
    name: Literal["format"] = Field(description=_NAME)
    tags: list[str] = Field(
        ["think", "answer"],
        min_length=1,
        description="format: the completion is these blocks, once each, in this order, none empty, and nothing else.",
    )


class RegexSection(BuiltinReward):
    name: Literal["regex"] = Field(description=_NAME)
    pattern: str = Field(description="regex: a Python regular expression; a full stop matches line ends too.")
    whole: bool = Field(False, description="regex: the whole completion must match, not a part of it.")
    ignore_case: bool = Field(False, description="regex: capitals and small letters are the same.")


class LanguageSection(BuiltinReward):
    name: Literal["language"] = Field(description=_NAME)
    language: str | None = Field(
        "en", pattern=r"^[a-z]{2,3}$", description="language: ISO 639 code of the right one; null: that of the prompt."
    )
    among: list[str] | None = Field(None, description="language: codes of the languages to tell apart. Left out: all.")
    probability: bool = Field(
        False, description="language: the reward is the probability of the language, instead of 1 or 0."
    )


class LengthSection(BuiltinReward):
    name: Literal["length"] = Field(description=_NAME)
    at_least: int = Field(0, ge=0, description="length: shortest length that has the reward 1.")
    at_most: Positive | None = Field(None, description="length: longest length that has the reward 1. Left out: any.")
    slack: int = Field(0, ge=0, description="length: length outside over which the reward falls to 0.")
    unit: Literal["tokens", "words", "characters"] = Field("tokens", description="length: what is counted.")


class F1Section(BuiltinReward):
    name: Literal["f1"] = Field(description=_NAME)


class CodeSection(BuiltinReward):
    name: Literal["code"] = Field(description=_NAME)
    tests: str = Field("tests", description="code: the column that holds a prompt's tests. Without it: the answer.")
    partial_credit: bool = Field(True, description="code: the share of tests passed. false: 1 for all of them, else 0.")
    test_timeout_s: float = Field(4.0, gt=0, description="code: seconds for one test.")
    total_s: float = Field(
        20.0, gt=0, description="code: seconds for all tests of a response; those not begun by then have failed."
    )
    memory_mb: int = Field(512, ge=64, description="code: memory of one test, in MiB.")


class LLMJudgeSection(BuiltinReward):
    name: Literal["llm_judge"] = Field(description=_NAME)
    base_url: str = Field(description="llm_judge: the endpoint up to its version, such as http://host:8000/v1.")
    model: str = Field(description="llm_judge: the model's name at the endpoint.")
    rubric: str = Field(
        "Is the response correct and complete? Compare it with the reference answer where there is one.",
        description="llm_judge: what makes a response good.",
    )
    max_score: Positive = Field(10, description="llm_judge: the judge gives 0 to this; the reward is the share of it.")
    api_key_env: str | None = Field(
        None, description="llm_judge: name of the environment variable with the key. Left out: no key is sent."
    )
    concurrency: Positive = Field(16, description="llm_judge: requests in flight at once, at most.")
    retries: int = Field(3, ge=0, description="llm_judge: further requests after one that failed, with back-off.")
    max_tokens: Positive = Field(1024, description="llm_judge: longest reply, in tokens.")
    temperature: float = Field(0.0, ge=0, description="llm_judge: sampling temperature of the judge.")
    cost_per_million: tuple[float, float] = Field(
        (0.0, 0.0), description="llm_judge: price of a million tokens of the prompt, and of the reply."
    )
    cache: str | None = Field(
        None,
        description="llm_judge: where scores are kept for requests that come again: a folder or an s3:// URI. Left "
        "out: in this process only.",
    )


class RewardModelSection(BuiltinReward):
    name: Literal["reward_model"] = Field(description=_NAME)
    model: str = Field(description="reward_model: a Hugging Face folder of a sequence classifier.")
    batch_size: Positive = Field(16, description="reward_model: texts scored at once.")
    device: str = Field("cpu", description="reward_model: torch device, such as cuda:1.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="reward_model: type of its weights.")
    label: int | None = Field(
        None, ge=0, description="reward_model: the class whose probability is the reward, where there are several."
    )
    sigmoid: bool = Field(False, description="reward_model: the single output as a probability, not as it is.")
    max_length: Positive | None = Field(
        None, description="reward_model: longest text in tokens; a longer one is not graded. Left out: the model's."
    )


_Single = (
    Annotated[RewardFunction, Tag("<custom>")]
    | Annotated[ExactMatchSection, Tag("<exact_match>")]
    | Annotated[LastIntegerSection, Tag("<last_integer>")]
    | Annotated[F1Section, Tag("<f1>")]
    | Annotated[MathSection, Tag("<math>")]
    | Annotated[ReasoningGymSection, Tag("<reasoning_gym>")]
    | Annotated[CodeSection, Tag("<code>")]
    | Annotated[ThinkingSection, Tag("<thinking>")]
    | Annotated[FormatSection, Tag("<format>")]
    | Annotated[RegexSection, Tag("<regex>")]
    | Annotated[LanguageSection, Tag("<language>")]
    | Annotated[LengthSection, Tag("<length>")]
    | Annotated[OverlongSection, Tag("<overlong>")]
    | Annotated[LLMJudgeSection, Tag("<llm_judge>")]
    | Annotated[RewardModelSection, Tag("<reward_model>")]
)
VerifierSection = Annotated[_Single, Discriminator(kind("custom"))]
_VERIFIER: TypeAdapter[RewardFunction | BuiltinReward] = TypeAdapter(VerifierSection)


class EnsembleSection(BuiltinReward):
    name: Literal["ensemble"] = Field(description=_NAME)
    verifiers: list[dict[str, Any]] = Field(
        min_length=3, description=f"ensemble: the weak verifiers, each as an element of rewards.functions. {_ANSWER}"
    )
    threshold: float = Field(0.5, description="ensemble: a verifier votes for a response it grades at this or above.")
    decision: bool = Field(False, description="ensemble: the reward is 1 or 0, not the probability of being correct.")
    missing: int = Field(0, ge=0, description="ensemble: verifiers that may fail on a response that is graded.")

    @field_validator("verifiers")
    @classmethod
    def _each_is_a_reward(cls, verifiers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each verifier in full, so that the same ensemble is always written the same way."""
        return [_verifier(number, verifier).model_dump(mode="json") for number, verifier in enumerate(verifiers)]

    @property
    def members(self) -> list[RewardFunction | BuiltinReward]:
        return [verifier_section(verifier) for verifier in self.verifiers]


class EnvironmentRewardSection(BuiltinReward):
    """No verifier: the environment has graded before."""

    name: Literal["environment"] = Field(description=_NAME)


RewardSection = Annotated[
    _Single | Annotated[EnvironmentRewardSection, Tag("<environment>")] | Annotated[EnsembleSection, Tag("<ensemble>")],
    Discriminator(kind("custom")),
]


def all_rewards(functions: Iterable[RewardFunction | BuiltinReward]) -> Iterator[RewardFunction | BuiltinReward]:
    """Every reward that is used: ``functions``, and the verifiers of an ensemble among them, however it is named."""
    for function in functions:
        yield function
        yield from function.members


def verifier_section(verifier: dict[str, Any]) -> RewardFunction | BuiltinReward:
    """A reward as it is written below ``verifiers``: an ensemble is none. Raises ValidationError."""
    return _VERIFIER.validate_python(verifier)


def _reward_in(value: Any) -> RewardFunction | BuiltinReward | None:
    try:
        return verifier_section(value)
    except ValidationError:  # an option of that name of a reward of the user's own
        return None


def _verifier(number: int, verifier: dict[str, Any]) -> RewardFunction | BuiltinReward:
    try:
        return verifier_section(verifier)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("<"))
        raise ValueError(f"verifier {number}: {place}: {first['msg']}") from None
