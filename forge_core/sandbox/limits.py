"""What code in a sandbox may use."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Sizes are in MiB of 2**20 bytes. ``memory_mb`` holds for the address space of each process and for what all
    processes use together; ``processes`` counts threads too; ``file_mb`` is the largest file, ``disk_mb`` and ``files``
    are for all of ``/tmp``; ``output_mb`` is for stdout and for stderr each."""

    memory_mb: int = 512
    processes: int = 32
    open_files: int = 128
    file_mb: int = 16
    disk_mb: int = 64
    files: int = 4096
    output_mb: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}: a limit of a sandbox is at least 1")
        if self.memory_mb < 64:
            raise ValueError(f"memory_mb is {self.memory_mb}: Python itself does not start with less than 64")

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb * MIB

    @property
    def output_bytes(self) -> int:
        return self.output_mb * MIB

    def for_processes(self, cpu_s: int) -> dict[str, int]:
        """The limits that the kernel keeps, by the name that Python's ``resource`` gives them; ``cpu_s``: seconds of
        processor time of each process."""
        return {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_CPU": cpu_s,
            "RLIMIT_FSIZE": self.file_mb * MIB,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_NPROC": self.processes + 1,  # process 1 is ours
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": 256,
        }
