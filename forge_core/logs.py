"""Log files by run and role, below the Forge home of the machine that a process runs on.

    logs/<run_id>/<role>-<pid>.log            what the process itself logs
    logs/<run_id>/<role>-<pid>/<engine>.log   what its child engines print (``vllm-0``, ``trainer-0``)

Invariants:
- A file takes ``LIMIT`` bytes at most, a little more between two looks, and so do each of its ``BACKUPS`` older parts
  (``.1`` is the newest). Of each role the ``KEEP`` newest processes of a run keep their files, and all that still live.
- Only this user can read them.
- A log is a convenience: a home that cannot be written ends no run.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from forge_core.home import forge_home

RUN = "run"  # the role of a process that does all of a run
ENGINES = {"vllm": "generator", "trainer": "trainer"}  # beginnings of engines' file names, and whose work they do
LIMIT = 32 * 1024 * 1024  # bytes
BACKUPS = 3
KEEP = 20
LOOK_S = 10.0
LOGGERS = ("forge", "prefect")
_PROCESS = re.compile(r"([a-z]+)-(\d+)(\.log.*)?$")
_watched: set[Path] = set()
_watching = threading.Lock()
log = logging.getLogger("forge")


def run_logs(run_id: str) -> Path:
    """The folder of the logs of ``run_id`` on this machine; it need not exist."""
    return forge_home() / "logs" / run_id


def engine_logs(run_id: str, role: str | None) -> Path:
    """The folder for logs of the child engines of this process, which are kept from growing without bound."""
    folder = run_logs(run_id) / f"{role or RUN}-{os.getpid()}"
    _make_private(folder)
    with _watching:
        if folder not in _watched:
            _watched.add(folder)
            threading.Thread(target=_watch, args=(folder,), name="forge-log-rotation", daemon=True).start()
    return folder


class ProcessLog:
    """The file of what this process logs while it works on a run, until ``close``."""

    def __init__(self, run_id: str, role: str | None) -> None:
        self._loggers = [logging.getLogger(name) for name in LOGGERS]
        self._handler: logging.Handler | None = None
        try:
            self._handler = _handler(run_logs(run_id), role or RUN)
        except OSError as error:
            log.warning("this process writes no log file: %s: set FORGE_HOME to a folder that you can write", error)
            return
        for logger in self._loggers:
            logger.addHandler(self._handler)

    def close(self) -> None:
        if self._handler is not None:
            for logger in self._loggers:
                logger.removeHandler(self._handler)
            self._handler.close()


def log_files(run_id: str, role: str | None = None) -> list[Path]:
    """The log files of a run on this machine, of one role or of all: those written last at the end."""
    files = [path for path in run_logs(run_id).rglob("*.log*") if path.is_file()]
    mine = [path for path in files if role is None or role in _roles(path.relative_to(run_logs(run_id)))]
    return sorted(mine, key=_written_at)


def roles(run_id: str) -> list[str]:
    """The roles that have log files of a run on this machine."""
    return sorted({r for path in log_files(run_id) for r in _roles(path.relative_to(run_logs(run_id)))})


def rotate(path: Path, limit: int = LIMIT) -> None:
    """Move what ``path`` holds to ``<path>.1`` when that is more than ``limit`` bytes. Its writer, which appends, goes
    on with an empty file; what it writes in this moment may be lost."""
    if path.stat().st_size <= limit:
        return
    for number in range(BACKUPS - 1, 0, -1):
        with suppress(FileNotFoundError):
            os.replace(f"{path}.{number}", f"{path}.{number + 1}")
    shutil.copyfile(path, f"{path}.1")
    os.truncate(path, 0)


def _make_private(folder: Path) -> None:
    home = forge_home()
    home.mkdir(parents=True, exist_ok=True)
    (home / "logs").mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def _handler(folder: Path, role: str) -> logging.Handler:
    _make_private(folder)
    _prune(folder, role)
    handler = RotatingFileHandler(folder / f"{role}-{os.getpid()}.log", maxBytes=LIMIT, backupCount=BACKUPS)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(task)s%(message)s"))
    handler.addFilter(_name_task)
    return handler


def _name_task(record: logging.LogRecord) -> bool:
    """Prefect's records say "Finished in state Completed()", and of which task in a field of their own."""
    name = getattr(record, "task_run_name", None)
    record.task = f"{name}: " if name else ""
    return True


def _prune(folder: Path, role: str) -> None:
    """Remove the files of the oldest processes of ``role`` that are gone."""
    of_process: dict[int, list[Path]] = {}
    for path in sorted(folder.glob(f"{role}-*"), key=_written_at):
        if match := _PROCESS.match(path.name):
            of_process.setdefault(int(match[2]), []).append(path)
    gone = [pid for pid in of_process if not Path(f"/proc/{pid}").exists()]
    for pid in gone[: max(0, len(of_process) - KEEP)]:
        for path in of_process[pid]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # rotated or removed at this moment
        return 0.0


def _watch(folder: Path) -> None:
    while folder.is_dir():
        for path in folder.glob("*.log"):
            with suppress(OSError):  # a full disk, or somebody removed it
                rotate(path)
        time.sleep(LOOK_S)


def _roles(path: Path) -> set[str]:
    """Whose logs the file ``path``, relative to the run's folder, holds."""
    process, engine = path.parts[0].partition("-")[0], path.name.partition("-")[0]
    return {process, *([ENGINES[engine]] if len(path.parts) > 1 and engine in ENGINES else [])}
