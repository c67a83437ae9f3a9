"""Locks a process in, from inside and for good: it may write to its own folders alone, and has no network.

Landlock (Linux 5.13 and newer) guards files, a seccomp filter guards sockets; neither needs rights or programs. What the
kernel does not offer is reported, never pretended. Only the standard library is needed; run as a script, this tells what
can be had here.
"""

from __future__ import annotations

import ctypes
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
ARCHITECTURES = {"x86_64": (0xC000003E, 41, 101), "aarch64": (0xC00000B7, 198, 117)}
"""Audit number, and the numbers of the calls ``socket`` and ``ptrace``."""
IO_URING_SETUP = 425
LOCAL_SOCKETS = 1


@dataclass(frozen=True)
class Isolation:
    """What a process is kept from."""

    files: bool = False
    """It writes to its own folders alone."""
    network: bool = False
    """It has no sockets but local ones."""

    @property
    def is_full(self) -> bool:
        """Whether nothing is missing."""
        return self.files and self.network

    @property
    def text(self) -> str:
        """The level in words."""
        if self.is_full:
            return "full: read-only files (Landlock), no network (seccomp)"
        have = [name for name, there in (("read-only files", self.files), ("no network", self.network)) if there]
        return f"partial: {have[0]} only" if have else "none: a process of its own with limits of time and memory alone"


active = Isolation()
"""What this process is kept from."""


def enter(writable: Sequence[str], hidden: str = "") -> Isolation:
    """Lock this thread in, and all that it starts from now on.

    Args:
        writable: folders that may be written to.
        hidden: a folder that may not even be read.
    """
    if sys.platform != "linux":
        return Isolation()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return Isolation()
    return Isolation(_lock_files(libc, writable, hidden), _lock_network(libc))


def _lock_files(libc: ctypes.CDLL, writable: Sequence[str], hidden: str) -> bool:
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
    try:
        allowed = [(folder, handled) for folder in writable]
        # Devices have rights of their own; a GPU is opened for writing.
        allowed += [("/dev", handled & (WRITE_FILE | TRUNCATE | READ))]
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


def _lock_network(libc: ctypes.CDLL) -> bool:
    known = ARCHITECTURES.get(platform.machine())
    if known is None:
        return False
    audit, socket_call, ptrace_call = known
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | 1  # EPERM
    steps = [
        (load, 0, 0, 4),
        (equal, 0, 7, audit),
        (load, 0, 0, 0),
        # Calls of the x32 kind have other numbers.
        (at_least, 5, 0, 0x40000000),
        (equal, 4, 0, ptrace_call),
        (equal, 3, 0, IO_URING_SETUP),
        (equal, 0, 3, socket_call),
        (load, 0, 0, 16),
        (equal, 1, 0, LOCAL_SOCKETS),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = struct.pack("@HP", len(steps), ctypes.addressof(program))
    return int(libc.prctl(SET_SECCOMP, FILTER_MODE, header, 0, 0)) == 0


if __name__ == "__main__":
    print(enter([], "").text)
