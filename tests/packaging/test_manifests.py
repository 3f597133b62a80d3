"""pyproject.toml is the one statement of dependencies; every other manifest agrees with it."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU_EXTRAS = ("dev", "docs", "examples")


def requirements(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [r for r in map(Requirement, lines) if r.name != PROJECT["name"]]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@cache
def locked() -> dict[str, set[str]]:
    versions: dict[str, set[str]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        versions.setdefault(package["name"], set()).add(package["version"])
    return versions


@pytest.mark.parametrize("requirement", requirements(*CPU_EXTRAS), ids=lambda r: r.name)
def test_every_dependency_is_pinned_for_the_cpu_at_a_version_it_allows(requirement):
    pinned = pins().get(canonicalize_name(requirement.name))
    assert pinned is not None, f"{requirement.name} is missing in constraints/cpu.txt"
    assert requirement.specifier.contains(pinned, prereleases=True), f"{requirement} against {pinned}"


def test_the_pins_are_complete_for_what_is_installed_here():
    """A missing pin would make the set-up search for versions (slow) and drift from one day to the next."""
    pinned, missing, seen = pins(), {}, set()
    waiting = [(r.name, "") for r in requirements(*CPU_EXTRAS)]
    while waiting:
        name, extra = waiting.pop()
        key = (canonicalize_name(name), extra)
        if key in seen:
            continue
        seen.add(key)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # an optional part of another package
        version = installed.version.split("+")[0]
        if pinned.get(key[0]) != version:
            missing[key[0]] = version
        for line in installed.requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed.name, ""), *((needed.name, e) for e in needed.extras)]
    assert missing == {}, "constraints/cpu.txt lacks these pins, or has others"


def test_the_pins_are_sorted_and_given_once():
    lines = [line for line in (ROOT / "constraints" / "cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines), key=lambda line: line.split("==")[0])
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+", line) for line in lines)


@pytest.mark.parametrize("requirement", requirements(*PROJECT["optional-dependencies"]), ids=lambda r: r.name)
def test_every_dependency_is_in_the_uv_lock_at_a_version_it_allows(requirement):
    versions = locked().get(canonicalize_name(requirement.name))
    assert versions, f"{requirement.name} is missing in uv.lock: run uv lock"
    for version in versions:
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} against {version}"


def test_the_uv_lock_was_made_from_this_pyproject():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (own,) = [package for package in lock["package"] if package["name"] == PROJECT["name"]]
    stated = {(canonicalize_name(r.name), "", str(r.specifier)) for r in requirements()}
    for extra, lines in PROJECT["optional-dependencies"].items():
        own_lines = [r for r in map(Requirement, lines) if r.name != PROJECT["name"]]
        stated |= {(canonicalize_name(r.name), extra, str(r.specifier)) for r in own_lines}
    recorded = set()
    for entry in own["metadata"]["requires-dist"]:
        extra = re.search(r"extra == '([^']+)'", entry.get("marker", ""))
        specifier = str(SpecifierSet(entry.get("specifier", "")))
        if entry["name"] != PROJECT["name"]:
            recorded.add((entry["name"], extra[1] if extra else "", specifier))
    assert recorded == stated, "run uv lock"
    assert SpecifierSet(lock["requires-python"]) == SpecifierSet(PROJECT["requires-python"])


def test_the_uv_lock_knows_no_index_but_the_public_one():
    hosts = set(re.findall(r"https?://([^/\"]+)", (ROOT / "uv.lock").read_text()))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


def test_the_uv_lock_gives_developers_the_tested_torch():
    assert pins()["torch"] in locked()["torch"]


def test_the_conda_manifest_states_python_and_leaves_the_rest_to_pip():
    manifest = yaml.safe_load((ROOT / "environment.yml").read_text())
    python = [line for line in manifest["dependencies"] if isinstance(line, str) and line.startswith("python")]
    assert [SpecifierSet(line.removeprefix("python")) for line in python] == [SpecifierSet(PROJECT["requires-python"])]
    (pip,) = [entry["pip"] for entry in manifest["dependencies"] if isinstance(entry, dict)]
    assert pip[-2:] == ["-c constraints/cpu.txt", "-e .[dev]"]


def test_the_pixi_manifest_states_python_and_installs_this_project():
    manifest = tomllib.loads((ROOT / "pixi.toml").read_text())
    assert SpecifierSet(manifest["dependencies"]["python"]) == SpecifierSet(PROJECT["requires-python"])
    assert manifest["pypi-dependencies"] == {PROJECT["name"]: {"path": ".", "editable": True, "extras": ["dev"]}}
    assert manifest["workspace"]["name"] == PROJECT["name"]


def test_the_ci_script_can_be_run_and_names_targets_that_exist():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    (phases,) = re.findall(r"for phase in (.*); do", script.read_text())
    assert set(phases.split()) <= make_targets()
    assert {"lint", "test"} <= set(phases.split())


@pytest.mark.parametrize("document", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), ids=lambda p: p.name)
def test_a_document_names_only_make_targets_and_extras_that_exist(document):
    text = document.read_text()
    assert set(re.findall(r"\bmake ([a-z][a-z-]+)(?=[`\s])", _code(text))) <= make_targets()
    assert set(re.findall(r"'\.\[([a-z]+)\]'", text)) <= set(PROJECT["optional-dependencies"])


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.M))


def _code(text: str) -> str:
    return "\n".join([*re.findall(r"```.*?```", text, flags=re.S), *re.findall(r"`[^`\n]+`", text)])


def test_citation_and_changelog_are_of_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert newest is not None
    assert newest[1] == PROJECT["version"]
