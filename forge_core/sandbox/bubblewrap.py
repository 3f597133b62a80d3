"""The command that starts a sandbox, and what it needs of this machine.

Guarantees of a sandbox, kept by the kernel:
- Namespaces of its own for users, processes, IPC, network, host name and cgroups: no process of the host can be seen or
  signalled, and there is no network, the host's loopback included.
- The root is the image (``image.py``), read-only; ``/tmp`` is empty, in memory, of bounded size, and gone afterwards.
- No capability, no way to gain one, no terminal, and a filter of system calls (``seccomp.py``).
- Its environment is made of constants; bubblewrap itself is started with an empty one.
- It ends when the thread that started it does, whatever ended that.

As root the sandbox is started by an unprivileged user: limits on processes do not hold for root, and what broke out
would be nobody.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from forge_core.sandbox.errors import SandboxError
from forge_core.sandbox.image import DEVICES, HARNESS, LIBRARIES, PYTHON
from forge_core.sandbox.limits import MIB, Limits

INSTALL = "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora, RHEL), or your system's own"
UNPRIVILEGED = 65533  # an id that no user has, and that a container whose ids are mapped has too
_ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": os.path.dirname(PYTHON),
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": LIBRARIES,
    "MALLOC_ARENA_MAX": "1",  # every other arena takes 64 MiB of the address space
    "PYTHONHASHSEED": "0",  # the same verdict each time
}
_NAMESPACES = ("user", "pid", "ipc", "net", "uts", "cgroup")


def executable() -> str:
    """The path of bubblewrap. Raises SandboxError with the command that installs it."""
    if sys.platform != "linux":
        raise SandboxError(
            f"sandbox: code that a model wrote runs only in a sandbox, which needs Linux (this is {sys.platform})"
        )
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError(
            "sandbox: bubblewrap is not installed, and code that a model wrote never runs without it; install it: "
            f"{INSTALL}"
        )
    return found


def forbidden(reason: str) -> SandboxError:
    """The error for a machine on which bubblewrap starts nothing."""
    return SandboxError(
        f"sandbox: bubblewrap cannot make a sandbox here ({reason.strip() or 'no reason given'}); code that a model "
        "wrote never runs without one. Allow user namespaces: sysctl -w user.max_user_namespaces=10000 "
        "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 (those that exist); in a "
        "container, start it with a seccomp profile that allows unshare, clone and mount (docs/sandbox.md)"
    )


def command(bwrap: str, image: Path, limits: Limits, status_fd: int, filter_fd: int, code_fd: int) -> list[str]:
    """Arguments up to and including the interpreter. ``status_fd`` is told the process id of the sandbox's process 1,
    ``filter_fd`` holds the filter of system calls and ``code_fd`` what becomes ``/tmp/main.py``."""
    binds = [word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]
    settings = [word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value)]
    return [
        bwrap,
        *(f"--unshare-{name}" for name in _NAMESPACES),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
        *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
        *("--json-status-fd", str(status_fd), "--seccomp", str(filter_fd)),
        *("--ro-bind", str(image), "/", "--proc", "/proc", *binds),
        *("--size", str(limits.disk_mb * MIB), "--tmpfs", "/tmp", "--file", str(code_fd), "/tmp/main.py"),
        *("--chdir", "/tmp", "--clearenv", *settings, "--"),
        *(PYTHON, "-s", "-S", "-P", "-B", "-X", "utf8"),
        *("-c", f"import sys; sys.path.insert(0, {HARNESS!r}); import boot; boot.main()"),
    ]


def identity() -> tuple[list[str], dict[str, Any]]:
    """What chooses the user that starts a sandbox: words before the command, and arguments of ``subprocess.Popen``.

    These alone would do, but to change its user Popen copies this process first: a tenth of a second per gigabyte.
    """
    if os.geteuid() != 0 or not all(map(_is_mapped, ("uid_map", "gid_map"))):
        return [], {}  # a root that has no other ids is an ordinary user outside of its container
    if (setpriv := shutil.which("setpriv")) is None:
        return [], {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": []}
    return [setpriv, f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups", "--"], {}


def _is_mapped(name: str) -> bool:
    """Whether the namespace of this process has the id ``UNPRIVILEGED``."""
    ranges = (map(int, line.split()) for line in Path("/proc/self", name).read_text().splitlines())
    return any(first <= UNPRIVILEGED < first + count for first, _, count in ranges)
