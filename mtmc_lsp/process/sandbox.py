"""A sandbox that a process enters itself and cannot leave: write access to a few folders only, and no network.

Landlock (Linux 5.13 and newer) restricts files, and a seccomp filter restricts system calls; neither needs privileges or
programs. :class:`Isolation` reports what the kernel supports. Needs only the standard library. Run as a script, this prints the
isolation that this machine supports.
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
"""Read files and list folders."""
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
WRITES = {1: WRITE_FILE | sum(1 << bit for bit in range(4, 13)), 2: 1 << 13, 3: TRUNCATE}
"""Rights that change files and folders, by the version of Landlock that introduced them."""
FILE_RIGHTS = WRITE_FILE | TRUNCATE | 1 << 2
"""Rights that a rule for a file, not a folder, may contain."""
NETWORK = 0b11
SCOPES = 0b11
"""No signals and no abstract sockets to processes outside."""
DEVICES = tuple(f"/dev/{name}" for name in "null zero full random urandom tty ptmx pts".split())
"""Devices that every process may write to."""
GPU_DEVICES = ("/dev/nvidia*", "/dev/kfd", "/dev/dri", "/dev/dxg")
GPU_FOLDERS = ("/dev/shm",)
"""CUDA creates files here to share memory between processes."""
GPU_FILES = ("/proc/self",)
"""CUDA writes the names of its threads here."""


@dataclass(frozen=True)
class SystemCalls:
    """System call numbers of one architecture."""

    audit: int
    """``AUDIT_ARCH`` constant of the architecture."""
    socket: int
    clone: int
    forbidden: tuple[int, ...]
    """``ptrace`` and access to the memory of other processes."""
    processes: tuple[int, ...]
    """``fork``, ``vfork`` and variants of ``execve``, as far as the architecture has them."""


CALLS = {
    "x86_64": SystemCalls(0xC000003E, 41, 56, (101, 310, 311), (57, 58, 59, 322)),
    "aarch64": SystemCalls(0xC00000B7, 198, 220, (117, 270, 271), (221, 281)),
}
IO_URING_SETUP, PIDFD_GETFD, CLONE3 = 425, 438, 435
LOCAL_SOCKETS = 1
CLONE_THREAD = 0x10000


@dataclass(frozen=True)
class Isolation:
    """How far a process is isolated."""

    files: bool = False
    """Whether it can write only to its own folders."""
    network: bool = False
    """Whether it has no network sockets."""
    gpu: str = ""
    """Why it runs without a sandbox because of the GPU; empty otherwise."""

    @property
    def is_full(self) -> bool:
        """Whether files and network are both restricted."""
        return self.files and self.network

    @property
    def text(self) -> str:
        """The level in words."""
        if self.is_full:
            return "full: read-only files (Landlock), no network (seccomp)"
        if self.gpu:
            return f"none: CUDA does not start in the sandbox ({self.gpu})"
        present = [text for text, is_on in (("read-only files", self.files), ("no network", self.network)) if is_on]
        return (
            f"partial: {present[0]} only" if present else "none: a separate process with limits of time and memory only"
        )


active = Isolation()
"""The isolation of this process."""


def enter(writable: Sequence[str], hidden: str = "", *, gpu: bool = False, programs: bool = False) -> Isolation:
    """Restrict this thread and all threads and processes that it starts later.

    Args:
        hidden: a folder without read access.
        programs: whether to allow starting programs, as compilers of kernels do.
    """
    if sys.platform != "linux":
        return Isolation()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return Isolation()
    return Isolation(_restrict_files(libc, writable, hidden, gpu), _restrict_calls(libc, gpu or programs))


def _restrict_files(libc: ctypes.CDLL, writable: Sequence[str], hidden: str, gpu: bool) -> bool:
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    writes = sum(bits for first, bits in WRITES.items() if first <= version)
    handled = writes | (READ if hidden else 0)
    # Older kernels accept a shorter structure.
    fields = [handled] + [NETWORK] * (version >= 4) + [SCOPES] * (version >= 6)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        return False
    device_rights = handled & (WRITE_FILE | TRUNCATE | READ)
    try:
        allowed = [(folder, handled) for folder in (*writable, *(GPU_FOLDERS if gpu else ()))]
        # CUDA opens GPU devices for writing.
        allowed += [(path, device_rights) for path in DEVICES]
        allowed += [(path, device_rights) for pattern in (GPU_DEVICES if gpu else ()) for path in glob.glob(pattern)]
        allowed += [(path, device_rights) for path in (GPU_FILES if gpu else ())]
        allowed += [(path, READ) for path in _all_except(hidden)] if hidden else []
        for path, rights in allowed:
            _allow(libc, rules, path, rights)
        return int(libc.syscall(RESTRICT_SELF, rules, 0)) == 0
    finally:
        os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, OPEN_PATH)
    except OSError:
        return  # a path that does not exist stays forbidden
    if not os.path.isdir(path):
        rights &= FILE_RIGHTS
    libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", rights, handle), 0)
    os.close(handle)


def _all_except(hidden: str) -> Iterator[str]:
    """All paths except the hidden folder and its parents: Landlock can only allow paths, not exclude them."""
    folder = os.path.realpath(hidden)
    while folder != "/":
        parent = os.path.dirname(folder)
        for entry in os.scandir(parent):
            # A link may lead back to the hidden folder; targets of other links are allowed under their real paths.
            if entry.path != folder and not entry.is_symlink():
                yield entry.path
        folder = parent


LOAD, EQUAL, AT_LEAST, HAS_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
CALL, MACHINE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in the kernel's ``seccomp_data`` structure."""


def _restrict_calls(libc: ctypes.CDLL, programs: bool) -> bool:
    """Forbid network and memory of other processes; without ``programs`` also all sockets and new processes."""
    calls = CALLS.get(platform.machine())
    if calls is None:
        return False
    refused = (*calls.forbidden, IO_URING_SETUP, PIDFD_GETFD, *(() if programs else (*calls.processes, calls.socket)))
    # Each step of the BPF program: instruction, operand, and for a test the result or the next offset if it holds.
    steps: list[tuple[int, int, int]] = [(LOAD, MACHINE, 0), (EQUAL, calls.audit, 0), (RETURN, REFUSE, 0)]
    steps += [(LOAD, CALL, 0)]
    # The x32 ABI has other call numbers.
    steps += [(AT_LEAST, 0x40000000, REFUSE), *((EQUAL, number, REFUSE) for number in refused)]
    if programs:
        steps += [(EQUAL, calls.socket, FIRST_ARGUMENT), (RETURN, ALLOW, 0)]
        steps += [(LOAD, FIRST_ARGUMENT, 0), (EQUAL, LOCAL_SOCKETS, ALLOW)]
    else:
        # A filter cannot read the flags of clone3. Without it, the C library creates threads by clone.
        steps += [(EQUAL, CLONE3, UNKNOWN), (EQUAL, calls.clone, FIRST_ARGUMENT), (RETURN, ALLOW, 0)]
        steps += [(LOAD, FIRST_ARGUMENT, 0), (HAS_BIT, CLONE_THREAD, ALLOW)]
    steps += [(RETURN, REFUSE, 0), (RETURN, ALLOW, 0), (RETURN, UNKNOWN, 0)]
    returns = {REFUSE: len(steps) - 3, ALLOW: len(steps) - 2, UNKNOWN: len(steps) - 1}

    def packed(i: int, step: tuple[int, int, int]) -> bytes:
        code, operand, then = step
        if code in (LOAD, RETURN):
            return struct.pack("=HBBI", code, 0, 0, operand)
        # The right architecture skips the refusal; a call with an argument to check skips the result for all other calls.
        jump = 1 if then in (0, FIRST_ARGUMENT) else returns[then] - i - 1
        return struct.pack("=HBBI", code, jump, 0, operand)

    program = ctypes.create_string_buffer(b"".join(packed(i, step) for i, step in enumerate(steps)))
    header = struct.pack("@HP", len(steps), ctypes.addressof(program))
    return int(libc.prctl(SET_SECCOMP, FILTER_MODE, header, 0, 0)) == 0


if __name__ == "__main__":
    print(enter([], "").text)
