"""The system calls that code in a sandbox cannot make, as a filter for the kernel.

Guarantees:
- No new namespace, no mount, no tracing of other processes, and none of the calls through which kernels have been
  broken most often (io_uring, bpf, perf events, userfaultfd, keyrings).
- Sockets are of the Unix family only. Namespaces do not shut off every family: a virtual machine's vsock is for all.
- No memory that the limits do not see: memfd, System V shared memory, messages and semaphores, and no socket that
  holds more than the kernel's default.
- A denied call fails with EPERM; ``clone3`` with ENOSYS, so that C libraries fall back to ``clone``, whose flags a
  filter can read.
"""

from __future__ import annotations

import platform
import struct

from forge_core.sandbox.errors import SandboxError

# Numbers of calls: asm/unistd_64.h (x86-64), asm-generic/unistd.h (arm64 and, from 424 on, every machine).
_EVERYWHERE = """
    io_uring_setup 425  io_uring_enter 426  io_uring_register 427  open_tree 428  move_mount 429  fsopen 430
    fsconfig 431  fsmount 432  fspick 433  pidfd_getfd 438  process_madvise 440  mount_setattr 442  quotactl_fd 443
    memfd_secret 447
"""
_X86 = """
    ptrace 101  process_vm_readv 310  process_vm_writev 311  kcmp 312  unshare 272  setns 308  mount 165  umount2 166
    pivot_root 155  chroot 161  swapon 167  reboot 169  acct 163  init_module 175  finit_module 313  kexec_load 246
    kexec_file_load 320  quotactl 179  add_key 248  request_key 249  keyctl 250  bpf 321  perf_event_open 298
    userfaultfd 323  memfd_create 319  shmget 29  shmat 30  semget 64  msgget 68  mq_open 240  name_to_handle_at 303
    open_by_handle_at 304  fanotify_init 300  syslog 103  vmsplice 278  mbind 237  migrate_pages 256  move_pages 279
    iopl 172  ioperm 173  modify_ldt 154
"""
_ARM = """
    ptrace 117  process_vm_readv 270  process_vm_writev 271  kcmp 272  unshare 97  setns 268  mount 40  umount2 39
    pivot_root 41  chroot 51  swapon 224  reboot 142  acct 89  init_module 105  finit_module 273  kexec_load 104
    kexec_file_load 294  quotactl 60  add_key 217  request_key 218  keyctl 219  bpf 280  perf_event_open 241
    userfaultfd 282  memfd_create 279  shmget 194  shmat 196  semget 190  msgget 186  mq_open 180
    name_to_handle_at 264  open_by_handle_at 265  fanotify_init 262  syslog 116  vmsplice 75  mbind 235
    migrate_pages 238  move_pages 239
"""
# Machine: its number in filters, the calls denied, clone, socket, socketpair, setsockopt.
_MACHINES = {"x86_64": (0xC000003E, _X86, 56, 41, 53, 54), "aarch64": (0xC00000B7, _ARM, 220, 198, 199, 208)}
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
_X32 = 0x40000000  # the second table of calls of x86-64
_AF_UNIX = 1
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE

# struct seccomp_data: number of the call, machine, instruction pointer, six arguments of 64 bits
_NUMBER, _MACHINE, _ARGUMENT_0, _ARGUMENT_2 = 0, 4, 16, 32
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38


def program(machine: str | None = None) -> bytes:
    """The filter as an array of ``struct sock_filter``, for a ``machine`` as Python's ``platform`` names it."""
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise SandboxError(f"sandbox: no list of system calls for {machine}; there is one for {', '.join(_MACHINES)}")
    number, denied, clone, socket, socketpair, setsockopt = _MACHINES[machine]
    code = [_op(_LOAD, _MACHINE), _op(_EQUAL, number, 1, 0), _op(_RETURN, _KILL)]
    code += [_op(_LOAD, _NUMBER), _op(_AT_LEAST, _X32, 0, 1), _op(_RETURN, _ERRNO | _ENOSYS)]
    for call in sorted(int(word) for word in (denied + _EVERYWHERE).split()[1::2]):
        code += [_op(_EQUAL, call, 0, 1), _op(_RETURN, _ERRNO | _EPERM)]
    code += [_op(_EQUAL, _CLONE3, 0, 1), _op(_RETURN, _ERRNO | _ENOSYS)]
    code += _without_values(setsockopt, _ARGUMENT_2, _BUFFER_SIZES)
    code += [_op(_EQUAL, clone, 0, 2), _op(_LOAD, _ARGUMENT_0), _op(_ANY_BIT, _NEW_NAMESPACES, 5, 4)]
    code += [_op(_EQUAL, socket, 1, 0), _op(_EQUAL, socketpair, 0, 2), _op(_LOAD, _ARGUMENT_0)]
    code += [_op(_EQUAL, _AF_UNIX, 0, 1), _op(_RETURN, _ALLOW), _op(_RETURN, _ERRNO | _EPERM)]
    return b"".join(code)


def _without_values(call: int, argument: int, values: tuple[int, ...]) -> list[bytes]:
    """``call`` is denied with one of ``values`` as its argument; other calls go on after these instructions."""
    checks = [_op(_EQUAL, value, left, 0) for left, value in zip(range(len(values), 0, -1), values, strict=True)]
    end = [_op(_RETURN, _ALLOW), _op(_RETURN, _ERRNO | _EPERM)]
    return [_op(_EQUAL, call, 0, len(checks) + 3), _op(_LOAD, argument), *checks, *end]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; jumps are relative to the one after it."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
