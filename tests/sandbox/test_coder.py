"""The coder: what a program is given, what comes back of it, and when there is no sandbox."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from forge_core.sandbox import Limits, SandboxedPythonCoder, SandboxError, seccomp
from forge_core.sandbox.bubblewrap import UNPRIVILEGED
from forge_core.sandbox.process import watch

pytestmark = pytest.mark.server  # many processes

ROOT = Path(__file__).resolve().parents[2]
SET_UP = "from forge_core.sandbox import SandboxedPythonCoder; coder = SandboxedPythonCoder(); coder.setup(); "


def test_output_and_exit_status_come_back(coder: SandboxedPythonCoder) -> None:
    result = coder.execute("import sys\nprint('Hello World')\nprint('oh', file=sys.stderr)\nsys.exit(3)")
    assert (result.stdout, result.stderr, result.exit_status) == ("Hello World\n", "oh\n", 3)
    assert not any((result.ok, result.timed_out, result.memory_exceeded, result.output_exceeded))


def test_an_error_of_the_program_is_in_stderr_without_a_frame_of_ours(coder: SandboxedPythonCoder) -> None:
    result = coder.execute("def f():\n    return 1 / 0\nf()")
    assert result.exit_status == 1
    assert "boot" not in result.stderr
    assert result.stderr.splitlines()[1:3] == ['  File "/tmp/main.py", line 3, in <module>', "    f()"]
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "SyntaxError" in coder.execute("def f(").stderr


def test_a_program_is_main_and_has_what_scripts_have(coder: SandboxedPythonCoder) -> None:
    code = "import sys, math, json, sqlite3, decimal\nif __name__ == '__main__': print(sys.argv, input())\nexit()"
    result = coder.execute(code, "one\ntwo")
    assert (result.stdout, result.stderr) == ("['/tmp/main.py'] one\n", "")
    assert result.ok


def test_subprocesses_pools_and_threads_work(coder: SandboxedPythonCoder) -> None:
    code = """
import multiprocessing, subprocess, sys, threading
with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(abs, [-1, -2]))
print(subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True).stdout)
thread = threading.Thread(target=print, args=(4,)); thread.start(); thread.join()
"""
    assert coder.execute(code).stdout.split() == ["[1,", "2]", "3", "4"]


def test_any_amount_of_input_is_read_or_left(coder: SandboxedPythonCoder) -> None:
    text = "é\n" * 2**20
    assert coder.execute("import sys; print(len(sys.stdin.read()))", text).stdout == f"{2**21}\n"
    assert coder.execute("print('not read')", text).stdout == "not read\n"
    assert coder.execute("print(repr(__import__('sys').stdin.read()))").stdout == "''\n"


def test_text_that_is_no_utf8_comes_back_readable(coder: SandboxedPythonCoder) -> None:
    assert coder.execute("import os; os.write(1, b'\\xff\\xfeok')").stdout == "��ok"


def test_programs_share_no_file(coder: SandboxedPythonCoder) -> None:
    assert coder.execute("open('/tmp/x', 'w').write('1'); print(open('/tmp/x').read())").stdout == "1\n"
    coder.recreate()
    assert coder.execute("import os; print(os.listdir('/tmp'))").stdout == "['main.py']\n"


def test_programs_run_side_by_side(coder: SandboxedPythonCoder) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: coder.execute(f"print({n})").stdout, range(60)))
    assert results == [f"{n}\n" for n in range(60)]


def test_limits_hold_for_each_program_and_not_for_all_together(coder: SandboxedPythonCoder) -> None:
    code = "import os, time\nfor _ in range(10):\n    if not os.fork(): time.sleep(1); os._exit(0)\nprint('ok')"
    with ThreadPoolExecutor(4) as pool:
        assert [result.stdout for result in pool.map(coder.execute, [code] * 4)] == ["ok\n"] * 4


def test_the_same_program_gives_the_same_answer(coder: SandboxedPythonCoder) -> None:
    code = "print(list({'a', 'b', 'c', 'd', 'e'}))"
    assert coder.execute(code).stdout == coder.execute(code).stdout


def test_a_coder_that_is_not_set_up_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"call setup\(\) first"):
        SandboxedPythonCoder().execute("print(1)")


def test_limits_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="processes is 0"):
        Limits(processes=0)
    with pytest.raises(ValueError, match="does not start with less than 64"):
        Limits(memory_mb=32)


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        SandboxedPythonCoder().setup()


def test_where_namespaces_are_forbidden_nothing_runs() -> None:
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    jail = [bwrap, "--dev-bind", "/", "/", "--unshare-user", "--uid", str(os.geteuid())]
    jail += ["--disable-userns", "--chdir", str(ROOT)]
    inner = subprocess.run([*jail, sys.executable, "-c", SET_UP], capture_output=True, text=True, check=False)
    assert inner.returncode == 1
    assert "bubblewrap cannot make a sandbox here" in inner.stderr or "could be made" in inner.stderr
    assert "user.max_user_namespaces" in inner.stderr


def test_a_root_without_other_ids_has_a_sandbox() -> None:
    """As in a container of an ordinary user."""
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    jail = [bwrap, "--dev-bind", "/", "/", "--unshare-user", "--uid", str(os.geteuid()), "--chdir", str(ROOT)]
    code = SET_UP + "print(coder.execute('print(1)').stdout)"
    inner = subprocess.run([*jail, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert inner.stdout == "1\n\n", inner.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("setpriv", [True, False])
def test_root_starts_a_sandbox_as_nobody(
    coder: SandboxedPythonCoder, setpriv: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not setpriv:
        monkeypatch.setenv("PATH", str(tmp_path))
    process = coder.start("script", "print('begun', flush=True); import time; time.sleep(60)")
    try:
        watch([process], lambda: b"begun" in process.stdout)
        (inner,) = psutil.Process(process._bwrap.pid).children()
        ids = [set(getattr(p, kind)()) for p in (inner, inner.parent()) for kind in ("uids", "gids")]
        assert ids == [{UNPRIVILEGED}] * 4
        assert Path(f"/proc/{inner.pid}/status").read_text().count("Groups:\t \n") == 1
    finally:
        process.close()


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/usr/bin/python3").exists(), reason="needs root and Debian's Python")
def test_an_ordinary_user_has_a_sandbox_with_any_python() -> None:
    code = SET_UP + "print(coder.execute('import sys; print(sys.version_info[:2])').stdout)"
    script = f"import sys; sys.dont_write_bytecode = True; sys.path.insert(0, {str(ROOT)!r}); {code}"
    found = subprocess.run(
        ["/usr/bin/python3", "-c", script],
        **{"user": 4321, "group": 4321, "extra_groups": []},
        env={"PATH": os.defpath},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    shutil.rmtree("/var/tmp/forge-sandbox-4321", ignore_errors=True)
    assert found.stdout.startswith("(3, "), found.stderr


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for images that only this test uses, and that every user can reach."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    monkeypatch.setattr("forge_core.sandbox.image.FOLDER", folder)
    yield folder
    shutil.rmtree(folder)


def test_an_image_that_lost_a_file_is_made_again(images: Path) -> None:
    coder = SandboxedPythonCoder()
    coder.setup()
    (decoder,) = images.glob("*/*/python/lib*/python3*/json/decoder.py")
    decoder.unlink()
    coder.setup()
    assert coder.execute("import json; print(json.loads('[1]'))").stdout == "[1]\n"
    assert decoder.exists()


def test_images_that_nobody_has_used_for_long_are_removed(images: Path) -> None:
    root = images / f"forge-sandbox-{os.geteuid()}"
    for name in ("old", "recent"):
        (root / name).mkdir(parents=True)
    os.utime(root / "old", (0, 0))
    SandboxedPythonCoder().setup()
    assert not (root / "old").exists()
    assert (root / "recent").exists()


def test_an_image_that_a_sandbox_uses_is_used(images: Path) -> None:
    coder = SandboxedPythonCoder()
    coder.setup()
    (image,) = (images / f"forge-sandbox-{os.geteuid()}").iterdir()
    os.utime(image, (0, 0))
    assert coder.execute("print(1)").stdout == "1\n"
    assert image.stat().st_mtime > 0


def test_an_image_that_others_can_change_is_not_used(images: Path) -> None:
    folder = images / f"forge-sandbox-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(SandboxError, match="others can write"):
        SandboxedPythonCoder().setup()


def test_an_image_holds_no_installed_package_and_no_file_that_another_user_cannot_read(images: Path) -> None:
    before = os.umask(0o077)
    try:
        SandboxedPythonCoder().setup()
    finally:
        os.umask(before)
    (image,) = images.glob("*/*")
    files = [path for path in image.rglob("*") if not path.is_symlink()]
    assert not [path for path in files if "site-packages" in path.parts]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_system_calls_is_whole_instructions_whose_jumps_stay_inside(machine: str) -> None:
    program = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    jumps = [(at, code, true, false) for at, (code, true, false, _) in enumerate(program) if code & 7 == 5]
    assert all(at + 1 + max(true, false) < len(program) for at, _, true, false in jumps)
    assert program[-1][0] == 0x06


def test_a_machine_without_a_list_of_system_calls_has_no_sandbox() -> None:
    with pytest.raises(SandboxError, match="no list of system calls for riscv64"):
        seccomp.program("riscv64")
