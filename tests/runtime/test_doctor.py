from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from flows import doctor
from flows.doctor import Check, healthy, report


def by_name(checks: list[Check]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_this_installation_is_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    checks = report(store=str(tmp_path / "store"), home=tmp_path / "home")
    assert healthy(checks), [check for check in checks if check.essential and not check.ok]
    found = by_name(checks)
    assert found["prefect"].detail == metadata.version("prefect")
    assert found["torch"].detail == metadata.version("torch")
    assert f"{doctor.cores()} cores" in found["cores and memory"].detail
    assert str(tmp_path / "home") in found["prefect server"].detail
    assert "refuses to overwrite" in found["store"].detail
    assert "GiB free" in found["disk of the store"].detail


def test_every_check_that_is_not_good_says_what_to_do(tmp_path: Path) -> None:
    for check in report(home=tmp_path):
        assert check.detail
        assert check.ok or check.remedy


def test_a_missing_essential_package_fails_and_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ESSENTIAL", ("prefect", "torchtitan"))
    real = metadata.version

    def without_torchtitan(name: str) -> str:
        if name == "torchtitan":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor, "version", without_torchtitan)
    found = by_name(report())
    assert found["torchtitan"] == Check(
        "torchtitan", False, "not installed", "pip install 'torchtitan==0.3.0'", essential=True
    )
    assert not healthy(list(found.values()))


def test_a_package_of_a_version_that_breaks_forge_fails_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(doctor, "version", lambda name: "2.1.9" if name == "sqlalchemy" else real(name))
    check = by_name(report())["sqlalchemy"]
    assert not check.ok
    assert check.detail.startswith("2.1.9, not sqlalchemy<2.1,>=2.0 (with 2.1 Prefect's scheduler")
    assert check.remedy == "pip install 'sqlalchemy<2.1,>=2.0'"


def test_optional_parts_never_fail_the_verdict() -> None:
    optional = Check("bubblewrap", False, "not found", "install bubblewrap")
    assert healthy([Check("python", True, "3.11", essential=True), optional])


def test_a_store_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = by_name(report(store=str(tmp_path / "file")))["store"]
    assert not check.ok
    assert check.essential
    assert check.remedy


def test_a_home_that_cannot_be_written_fails_unless_a_server_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    check = by_name(report(home=tmp_path / "file"))["prefect server"]
    assert not check.ok
    assert "FORGE_HOME" in check.remedy
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    assert by_name(report(home=tmp_path / "file"))["prefect server"].ok


def test_a_bare_source_tree_is_told_to_install_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISTRIBUTION", "forge-rl-that-nobody-installed")
    checks = report()
    assert not healthy(checks)
    assert "pip install -e ." in checks[0].remedy
