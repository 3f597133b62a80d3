"""The path under which an engine loads its model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from forge_core.generation.engine_path import lasting_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model(folder: Path, layers: int = 2, weights: str = "") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"layers": {layers}}}')
    (folder / "weights").write_text(weights)
    return folder


pytestmark = pytest.mark.fast


def test_versions_of_one_architecture_have_one_path_after_the_other(tmp_path: Path) -> None:
    first, second = model(tmp_path / "v1", weights="1"), model(tmp_path / "v2", weights="2")
    with lasting_path(first) as before:
        assert (before / "weights").read_text() == "1"
    assert not before.exists()
    with lasting_path(second) as after:
        assert (after / "weights").read_text() == "2"
    assert after == before
    with lasting_path(model(tmp_path / "deeper", layers=3)) as other:
        assert other != before, "its code is another"


def test_engines_that_load_at_once_have_a_path_each(tmp_path: Path) -> None:
    first, second = model(tmp_path / "v1", weights="1"), model(tmp_path / "v2", weights="2")
    with lasting_path(first) as one:
        with lasting_path(second) as two:
            assert [(path / "weights").read_text() for path in (one, two)] == ["1", "2"]
        with lasting_path(second) as again:
            assert again == two
            assert (one / "weights").read_text() == "1"


def test_a_process_that_was_killed_leaves_its_path_to_the_next(tmp_path: Path, cache: Path) -> None:
    first, second = model(tmp_path / "v1", weights="1"), model(tmp_path / "v2", weights="2")
    dies = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from forge_core.generation.engine_path import lasting_path\n"
        "with lasting_path(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", dies, first], env={**os.environ}, check=False)
    (left,) = cache.glob("forge-models/*/0/model")
    assert left.resolve() == first
    with lasting_path(second) as path:
        assert (path, (path / "weights").read_text()) == (left, "2")


def test_an_error_while_an_engine_loads_frees_the_path(tmp_path: Path) -> None:
    folder = model(tmp_path / "v1")
    with pytest.raises(RuntimeError, match="no memory"), lasting_path(folder) as path:
        raise RuntimeError("no memory")
    assert not path.is_symlink()
    with lasting_path(folder) as again:
        assert again == path


def test_it_lies_where_vllm_keeps_what_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with lasting_path(model(tmp_path / "v1")) as path:
        assert path.is_relative_to(tmp_path / "xdg" / "vllm")


def test_without_a_cache_that_can_be_written_the_folder_is_loaded_itself(cache: Path, tmp_path: Path) -> None:
    folder = model(tmp_path / "v1")
    cache.write_text("a file where the folder would be")
    with lasting_path(folder) as path:
        assert path == folder


def test_without_links_the_folder_is_loaded_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no links on this file system")

    monkeypatch.setattr(Path, "symlink_to", fails)
    folder = model(tmp_path / "v1")
    for _ in range(2):
        with lasting_path(folder) as path:
            assert path == folder


def test_a_cache_that_is_removed_while_an_engine_loads_is_no_error(tmp_path: Path, cache: Path) -> None:
    first, second = model(tmp_path / "v1", weights="1"), model(tmp_path / "v2", weights="2")
    with lasting_path(first):
        shutil.rmtree(cache)
    with lasting_path(first) as one:
        shutil.rmtree(cache)
        with lasting_path(second) as two:
            assert two == one, "its lock is another file now"
            assert (two / "weights").read_text() == "2"
        with lasting_path(second) as two:
            pass
    with lasting_path(second) as two:
        assert (two / "weights").read_text() == "2"


def test_one_that_ends_leaves_the_link_of_another(tmp_path: Path, cache: Path) -> None:
    first, second = model(tmp_path / "v1", weights="1"), model(tmp_path / "v2", weights="2")
    with ExitStack() as late:
        with lasting_path(first):
            shutil.rmtree(cache)
            two = late.enter_context(lasting_path(second))
        assert (two / "weights").read_text() == "2"


def test_a_cache_in_the_home_folder_is_found_as_vllm_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", "~/cache")
    with lasting_path(model(tmp_path / "v1")) as path:
        assert path.is_relative_to(tmp_path / "home" / "cache")
