"""The coder: what a program is given, what comes back of it, and when there is no sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forge_core.sandbox import Limits, SandboxedPythonCoder, SandboxError
from forge_core.sandbox.image import image

ROOT = Path(__file__).resolve().parents[2]
SET_UP = "from forge_core.sandbox import SandboxedPythonCoder; coder = SandboxedPythonCoder(); coder.setup(); "


def test_output_and_exit_status_come_back(coder: SandboxedPythonCoder) -> None:
    result = coder.execute("import sys\nprint('Hello World')\nprint('oh', file=sys.stderr)\nsys.exit(3)")
    assert (result.stdout, result.stderr, result.exit_status) == ("Hello World\n", "oh\n", 3)
    assert not (result.ok or result.timed_out or result.memory_exceeded or result.output_exceeded)


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
        results = list(pool.map(lambda n: coder.execute(f"print({n})").stdout, range(20)))
    assert results == [f"{n}\n" for n in range(20)]


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
    jail = [bwrap, "--dev-bind", "/", "/", "--unshare-user", "--uid", "1000", "--disable-userns", "--chdir", str(ROOT)]
    inner = subprocess.run([*jail, sys.executable, "-c", SET_UP], capture_output=True, text=True, check=False)
    assert inner.returncode == 1
    assert "bubblewrap cannot make a sandbox here" in inner.stderr or "could be made" in inner.stderr
    assert "user.max_user_namespaces" in inner.stderr


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
    assert found.stdout.startswith("(3, "), found.stderr


def test_an_image_that_lost_a_file_is_made_again(coder: SandboxedPythonCoder) -> None:
    (library,) = image().glob("python/lib/python3*")
    (library / "json/decoder.py").unlink()
    coder.setup()
    assert coder.execute("import json; print(json.loads('[1]'))").stdout == "[1]\n"
    assert (library / "json/decoder.py").exists()


def test_an_image_that_others_can_change_is_not_used(coder: SandboxedPythonCoder) -> None:
    root = image().parent
    root.chmod(0o777)
    try:
        with pytest.raises(SandboxError, match="others can write"):
            coder.setup()
    finally:
        root.chmod(0o755)
    coder.setup()
