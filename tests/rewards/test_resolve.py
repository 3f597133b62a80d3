"""From the path of a reward to the function, and the digest of its source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forge_core.rewards import BUILTINS, RewardError, resolve, source_digest
from forge_core.rewards.exact_match import ExactMatch
from forge_core.rewards.grading import Spec
from forge_core.rewards.resolve import build, check_own

SOURCE = """
def length(prompt, completion, metadata, scale=1.0):
    return scale * len(completion)

def two(prompt, completion):
    return 0.0

class Fixed:
    def __init__(self, value=0.5):
        if value < 0:
            raise ValueError("value must not be negative")
        self.value = value

    def grade(self, prompt, completion, metadata):
        return self.value

class NoGrade:
    pass

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rewards_here.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # importing adds the folder
    return tmp_path


def spec(path: str, folder: Path | None = None, **options) -> Spec:
    return Spec("name", path, 1.0, options, folder)


@pytest.mark.parametrize("path", ["my_rewards_here.py:length", "my_rewards_here:length", "./my_rewards_here.py:length"])
def test_a_function_is_found_in_the_working_directory(folder: Path, path: str):
    assert resolve(path)("", "abc", {}) == 3


def test_a_file_is_found_beside_the_configuration(folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(RewardError, match="no such file"):
        resolve("my_rewards_here.py:length")
    assert resolve("my_rewards_here.py:length", folder)("", "abc", {}) == 3
    assert source_digest("my_rewards_here.py:length", folder)


def test_built_in_names_are_known():
    assert resolve("exact_match") is ExactMatch
    assert {name: len(source_digest(name)) for name in BUILTINS} == dict.fromkeys(BUILTINS, 64)


def test_options_go_to_the_class_or_function(folder: Path):
    assert build(spec("my_rewards_here.py:Fixed", value=0.25))("", "", {}) == 0.25
    assert build(spec("my_rewards_here.py:length", scale=2.0))("", "abc", {}) == 6.0


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("exactmatch", {}, "there is no reward 'exactmatch'; did you mean exact_match"),
        ("", {}, r"there is no reward ''; built-in are exact_match, f1, last_integer, math, reasoning_gym"),
        ("no_such_module_x:f", {}, "no_such_module_x:f: importing no_such_module_x failed: ModuleNotFoundError"),
        ("nowhere.py:f", {}, r"nowhere\.py:f: no such file"),
        ("my_rewards_here.py:lenght", {}, r"has no 'lenght'; it has Fixed, NoGrade, length, two"),
        ("my_rewards_here.py:number", {}, "is a int, not a function or class"),
        ("raises_when_imported.py:f", {}, r"raises_when_imported\.py:f: importing .* failed: ZeroDivisionError"),
        ("my_rewards_here.py:__import__('os')", {}, "write <module>:<name>"),
        ("my_rewards_here.py:NoGrade", {}, r"NoGrade has no method grade\(prompt, completion, metadata\)"),
        ("my_rewards_here.py:two", {}, r"two cannot be called as \(prompt, completion, metadata\)"),
        ("my_rewards_here.py:length", {"factor": 2}, r"length cannot be called as .*'factor'"),
        ("my_rewards_here.py:Fixed", {"size": 2}, r"Fixed with the options .*failed: TypeError: .*'size'"),
        ("my_rewards_here.py:Fixed", {"value": -1}, r"failed: ValueError: value must not be negative"),
    ],
)
def test_what_is_wrong_with_a_path_is_said(folder: Path, path: str, options: dict, message: str):
    (folder / "raises_when_imported.py").write_text("1 / 0\n")
    with pytest.raises(RewardError, match=message):
        build(spec(path, **options))


def test_the_source_digest_follows_the_file_and_nothing_else(folder: Path):
    first = source_digest("my_rewards_here.py:length")
    assert source_digest("my_rewards_here.py:Fixed") == first
    (folder / "other.py").write_text("x = 1\n")
    assert source_digest("my_rewards_here.py:length") == first
    (folder / "my_rewards_here.py").write_text(SOURCE + "\n# changed\n")
    assert source_digest("my_rewards_here.py:length") != first
    with pytest.raises(RewardError, match=r"gone\.py:f: no such file"):
        source_digest("gone.py:f")


def test_a_module_without_python_source_has_no_digest():
    with pytest.raises(RewardError, match="the module math has no Python source file"):
        source_digest("math:sin")


OWN = """
def never(*_, **__):
    raise SystemExit("code of the user was called")

def length(prompt, completion, metadata, scale=1.0): never()
def two(prompt, completion): never()

class Fixed:
    def __init__(self, value=0.5): never()
    def grade(self, prompt, completion, metadata): never()

class Needs(Fixed):
    def __init__(self, wanted): never()

class NoGrade:
    pass

class Number:
    grade = 3

class Short:
    def grade(self, prompt, completion): never()

class Static:
    @staticmethod
    def grade(prompt, completion, metadata): never()

class ShortStatic:
    @staticmethod
    def grade(completion, metadata): never()

class OfClass:
    @classmethod
    def grade(cls, prompt, completion, metadata): never()

class Sets:
    def __init__(self):
        self.grade = length

class LooksUp:
    def __getattr__(self, name): never()

class Described:
    @property
    def grade(self): never()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("NoGrade", {}, r"own_rewards\.py:NoGrade has no method grade\(prompt, completion, metadata\)"),
        ("Number", {}, "Number has no method grade"),
        ("Short", {}, r"Short cannot be called as \(prompt, completion, metadata\)"),
        ("ShortStatic", {}, "ShortStatic cannot be called as"),
        ("two", {}, "two cannot be called as"),
        ("length", {"factor": 2}, "length cannot be called as .*'factor'"),
        ("Fixed", {"vlue": 2}, "Fixed cannot be made with the options vlue: .*'vlue'; its options are value"),
        ("Needs", {"wnted": "mm"}, "Needs cannot be made with the options wnted: .*; its options are wanted"),
        ("Needs", {}, "'wanted'"),
    ],
)
def test_signatures_that_do_not_fit_are_refused_and_nothing_is_called(
    own: None, name: str, options: dict, message: str
):
    with pytest.raises(RewardError, match=f"rewards.functions: .*{message}"):
        check_own(spec(f"own_rewards.py:{name}", **options))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("length", {}),
        ("length", {"scale": 2.0}),
        ("Fixed", {"value": 1}),
        ("Needs", {"wanted": "mm"}),
        *((name, {}) for name in ("never", "Fixed", "Static", "OfClass", "Sets", "LooksUp", "Described")),
    ],
)
def test_signatures_that_fit_are_not_refused_and_nothing_is_called(own: None, name: str, options: dict):
    check_own(spec(f"own_rewards.py:{name}", **options))


TYPED = """
from __future__ import annotations
from typing import Optional

class Typed:
    def __init__(self, bonus: float = 0.1, times: int = 1, strict: bool = False, name: str = "", any=None,
                 maybe: Optional[float] = None, odd: Unknown = None): raise RuntimeError
    def grade(self, prompt, completion, metadata): return 0.0

def typed(prompt, completion, metadata, bonus: float = 0.1): return bonus

class Plain:
    def __init__(self, bonus: float = 0.1, times: int = 1, any: [] = None): raise RuntimeError
    def grade(self, prompt, completion, metadata): return 0.0
"""


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Plain", {"bonus": "abc"}, "bonus is of type str, and declared as float: set it below options:"),
        ("Plain", {"times": 1.5}, "times is of type float, and declared as int"),
        ("Plain", {"bonus": None}, "bonus is of type NoneType, and declared as float"),
        ("typed", {"bonus": "s3cret"}, "bonus is of type str, and declared as float"),
        ("Plain", {"bonus": 1, "times": 2, "any": "x"}, None),
        ("Plain", {"bonus": "${oc.env:BONUS}"}, None),
        ("Typed", {"bonus": "abc"}, None),  # an annotation that cannot be looked up: nothing is known
    ],
)
def test_an_option_of_another_type_than_declared_is_refused_before_any_code_runs(
    own: None, tmp_path: Path, name: str, options: dict, said: str | None
):
    (tmp_path / "typed_rewards.py").write_text(TYPED)
    if said is None:
        return check_own(spec(f"typed_rewards.py:{name}", **options))
    with pytest.raises(RewardError, match=rf"rewards\.functions: the options of typed_rewards\.py:{name}: {said}") as e:
        check_own(spec(f"typed_rewards.py:{name}", **options))
    assert "s3cret" not in str(e.value)
