"""Locks a process in, from inside and for good: it may write to its own folders alone, and has no network.

Landlock (Linux 5.13 and newer) guards files, a seccomp filter guards sockets; neither needs rights or programs. What the
kernel does not offer is reported, never pretended. Only the standard library is needed; run as a script, this tells what
can be had here.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import platform
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
SET_NO_NEW_PRIVS, SET_SECCOMP, FILTER_MODE = 38, 22, 2
OPEN_PATH = getattr(os, "O_PATH", 0) | os.O_CLOEXEC

READ = 1 << 2 | 1 << 3
"""Read a file, list a folder."""
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
WRITES = {1: WRITE_FILE | sum(1 << bit for bit in range(4, 13)), 2: 1 << 13, 3: TRUNCATE}
"""What changes files and folders, by the version of Landlock that first knows of it."""
OF_FILES = WRITE_FILE | TRUNCATE | 1 << 2
"""What a rule about a file, not a folder, may speak of."""
NETWORK = 0b11
SCOPES = 0b11
"""No signals to, and no abstract sockets of, processes outside."""
DEVICES = tuple(f"/dev/{name}" for name in "null zero full random urandom tty ptmx pts".split())
"""What any process may write to."""
GPU_DEVICES = ("/dev/nvidia*", "/dev/kfd", "/dev/dri", "/dev/dxg")
GPU_FOLDERS = ("/dev/shm",)
"""Where CUDA makes files to share memory between its processes."""
GPU_FILES = ("/proc/self",)
"""CUDA gives its threads names, by writing them there."""


@dataclass(frozen=True)
class Calls:
    """Numbers of system calls on one kind of machine."""

    audit: int
    socket: int
    clone: int
    forbidden: tuple[int, ...]
    """``ptrace``, and memory of other processes."""
    processes: tuple[int, ...]
    """``fork``, ``vfork`` and ``execve`` with its variants, as far as they are there."""


CALLS = {
    "x86_64": Calls(0xC000003E, 41, 56, (101, 310, 311), (57, 58, 59, 322)),
    "aarch64": Calls(0xC00000B7, 198, 220, (117, 270, 271), (221, 281)),
}
IO_URING_SETUP, PIDFD_GETFD, CLONE3 = 425, 438, 435
LOCAL_SOCKETS = 1
CLONE_THREAD = 0x10000


@dataclass(frozen=True)
class Isolation:
    """What a process is kept from."""

    files: bool = False
    """It writes to its own folders alone."""
    network: bool = False
    """It has no sockets but local ones."""
    gpu: str = ""
    """Why it is not locked in for the sake of the GPU; empty where that is no reason."""

    @property
    def is_full(self) -> bool:
        """Whether nothing is missing."""
        return self.files and self.network

    @property
    def text(self) -> str:
        """The level in words."""
        if self.is_full:
            return "full: read-only files (Landlock), no network (seccomp)"
        if self.gpu:
            return f"none: CUDA does not start in a process that is locked in ({self.gpu})"
        have = [name for name, there in (("read-only files", self.files), ("no network", self.network)) if there]
        return f"partial: {have[0]} only" if have else "none: a process of its own with limits of time and memory alone"


active = Isolation()
"""What this process is kept from."""


def enter(writable: Sequence[str], hidden: str = "", *, gpu: bool = False, programs: bool = False) -> Isolation:
    """Lock this thread in, and all that it starts from now on.

    Args:
        writable: folders that may be written to.
        hidden: a folder that may not even be read.
        gpu: whether it needs a GPU's devices.
        programs: whether it may start others, as compilers of kernels do.
    """
    if sys.platform != "linux":
        return Isolation()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return Isolation()
    return Isolation(_lock_files(libc, writable, hidden, gpu), _lock_calls(libc, gpu or programs))


def _lock_files(libc: ctypes.CDLL, writable: Sequence[str], hidden: str, gpu: bool) -> bool:
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    writes = sum(bits for first, bits in WRITES.items() if first <= version)
    handled = writes | (READ if hidden else 0)
    # Older kernels take a shorter description.
    fields = [handled] + [NETWORK] * (version >= 4) + [SCOPES] * (version >= 6)
    described = struct.pack(f"={len(fields)}Q", *fields)
    rules = libc.syscall(CREATE_RULESET, described, len(described), 0)
    if rules < 0:
        return False
    change = handled & (WRITE_FILE | TRUNCATE | READ)
    try:
        allowed = [(folder, handled) for folder in (*writable, *(GPU_FOLDERS if gpu else ()))]
        # A GPU is opened for writing.
        allowed += [(path, change) for path in DEVICES]
        allowed += [(path, change) for pattern in (GPU_DEVICES if gpu else ()) for path in glob.glob(pattern)]
        allowed += [(path, change) for path in (GPU_FILES if gpu else ())]
        allowed += [(path, READ) for path in _all_but(hidden)] if hidden else []
        for path, rights in allowed:
            _allow(libc, rules, path, rights)
        return int(libc.syscall(RESTRICT_SELF, rules, 0)) == 0
    finally:
        os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, OPEN_PATH)
    except OSError:
        return  # what is not there or cannot be reached stays forbidden
    if not os.path.isdir(path):
        rights &= OF_FILES
    libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)


def _all_but(hidden: str) -> Iterator[str]:
    """Everything beside the hidden folder and the folders around it: Landlock only allows, it cannot except."""
    folder = os.path.realpath(hidden)
    while folder != "/":
        around = os.path.dirname(folder)
        for entry in os.scandir(around):
            # A link may lead back to what is hidden; what others lead to is allowed at its own place.
            if entry.path != folder and not entry.is_symlink():
                yield entry.path
        folder = around


LOAD, EQUAL, AT_LEAST, HAS_BIT, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
CALL, MACHINE, FIRST_ARGUMENT = 0, 4, 16
"""Where a filter finds what it looks at."""


def _lock_calls(libc: ctypes.CDLL, programs: bool) -> bool:
    """No network and no other process's memory; without ``programs`` no sockets and no new processes at all."""
    calls = CALLS.get(platform.machine())
    if calls is None:
        return False
    refused = (*calls.forbidden, IO_URING_SETUP, PIDFD_GETFD, *(() if programs else (*calls.processes, calls.socket)))
    # Each step: what to do, its operand, and the answer or the part to go on with where it holds.
    steps: list[tuple[int, int, int]] = [(LOAD, MACHINE, 0), (EQUAL, calls.audit, 0), (ANSWER, REFUSE, 0)]
    steps += [(LOAD, CALL, 0)]
    # Calls of the x32 kind have other numbers.
    steps += [(AT_LEAST, 0x40000000, REFUSE), *((EQUAL, number, REFUSE) for number in refused)]
    if programs:
        steps += [(EQUAL, calls.socket, FIRST_ARGUMENT), (ANSWER, ALLOW, 0)]
        steps += [(LOAD, FIRST_ARGUMENT, 0), (EQUAL, LOCAL_SOCKETS, ALLOW)]
    else:
        # The C library asks for threads by the older call where the newer one, whose flags a filter cannot see, is missing.
        steps += [(EQUAL, CLONE3, UNKNOWN), (EQUAL, calls.clone, FIRST_ARGUMENT), (ANSWER, ALLOW, 0)]
        steps += [(LOAD, FIRST_ARGUMENT, 0), (HAS_BIT, CLONE_THREAD, ALLOW)]
    steps += [(ANSWER, REFUSE, 0), (ANSWER, ALLOW, 0), (ANSWER, UNKNOWN, 0)]
    places = {REFUSE: len(steps) - 3, ALLOW: len(steps) - 2, UNKNOWN: len(steps) - 1}

    def packed(i: int, step: tuple[int, int, int]) -> bytes:
        code, operand, then = step
        if code in (LOAD, ANSWER):
            return struct.pack("=HBBI", code, 0, 0, operand)
        # Right machine: past the refusal. An argument to look at: past the answer for all other calls.
        jump = 1 if then in (0, FIRST_ARGUMENT) else places[then] - i - 1
        return struct.pack("=HBBI", code, jump, 0, operand)

    program = ctypes.create_string_buffer(b"".join(packed(i, step) for i, step in enumerate(steps)))
    header = struct.pack("@HP", len(steps), ctypes.addressof(program))
    return int(libc.prctl(SET_SECCOMP, FILTER_MODE, header, 0, 0)) == 0


if __name__ == "__main__":
    print(enter([], "").text)
