"""The documented snippet in a real Helix, in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from documented import project, snippet
from editor import FAKE

HELIX = shutil.which("hx")
ESCAPE_SEQUENCE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")
SECONDS = 240.0

pytestmark = pytest.mark.skipif(HELIX is None, reason="Helix is not installed, for example from Debian's package hx")


def version() -> tuple[int, ...]:
    output = subprocess.run([str(HELIX), "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"(\d+)\.(\d+)", output)
    return tuple(map(int, match.groups())) if match else ()


class Terminal:
    """A pseudo-terminal with Helix on a line of a file."""

    def __init__(self, file: Path, environment: dict[str, str]) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.chdir(file.parent)
            os.execvpe(str(HELIX), [str(HELIX), f"{file.name}:6"], environment)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        self._written = b""

    def wait(self, is_done: Callable[[str], bool]) -> str:
        """Read until the text written since the last key satisfies a condition. Words are separated by one space."""
        deadline = time.monotonic() + SECONDS
        while True:
            text = b" ".join(ESCAPE_SEQUENCE.sub(b" ", self._written).split()).decode("utf-8", "replace")
            if is_done(text):
                return text
            assert time.monotonic() < deadline, text[-2000:]
            if select.select([self.master], [], [], 0.1)[0]:
                self._written += os.read(self.master, 1 << 16)

    def press(self, keys: str) -> None:
        """Press keys, and forget what was written before."""
        self._written = b""
        os.write(self.master, keys.encode())

    def actions(self, title: str) -> None:
        """Open the menu of actions until it contains a title: the server may not be ready."""
        deadline = time.monotonic() + SECONDS
        while True:
            self.press(" a")
            pause = time.monotonic() + 3
            text = self.wait(lambda text, pause=pause: title in text or time.monotonic() > pause)
            if title in text:
                return
            assert time.monotonic() < deadline, text[-2000:]
            self.escape()

    def escape(self) -> None:
        """Press escape alone: followed by a key at once, it would be Alt and that key."""
        self.press("\x1b")
        pause = time.monotonic() + 0.5
        self.wait(lambda _: time.monotonic() > pause)


@contextmanager
def helix(tmp_path: Path, languages: str) -> Iterator[tuple[Terminal, Path]]:
    """Helix with a ``languages.toml``, on the function of a user's file."""
    file = project(tmp_path / "user")
    (tmp_path / "config" / "helix").mkdir(parents=True)
    (tmp_path / "config" / "helix" / "languages.toml").write_text(languages)
    folders = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("CONFIG", "CACHE", "STATE")}
    terminal = Terminal(file, {**os.environ, **folders, "TERM": "xterm-256color"})
    try:
        yield terminal, file
    finally:
        os.kill(terminal.pid, signal.SIGKILL)
        os.waitpid(terminal.pid, 0)
        os.close(terminal.master)


def documented() -> str:
    return snippet("Helix", f'"{FAKE[0]}"\nargs = ["{FAKE[1]}"]')


def test_the_documented_snippet_optimises_and_keeps_a_step(tmp_path: Path) -> None:
    if version() < (23, 10):
        pytest.skip("language-servers is new in Helix 23.10")
    with helix(tmp_path, documented()) as (terminal, file):
        terminal.actions("Optimize to Triton kernel")
        terminal.press("\r")
        terminal.wait(lambda text: "improved" in text)
        terminal.escape()
        terminal.actions("Keep 1/2")
        terminal.press("\r")
        terminal.wait(lambda text: "dispatch" in text)
        terminal.escape()
        terminal.press(":w\r")
        terminal.wait(lambda _: "@triton.jit" in file.read_text())


def test_without_trust_it_says_what_to_configure_and_runs_nothing(tmp_path: Path) -> None:
    untrusted = documented().replace("config = { trusted = true }\n", "")
    assert "trusted" not in untrusted
    with helix(tmp_path, untrusted) as (terminal, file):
        terminal.actions("Optimize to Triton kernel")
        terminal.press("\r")
        terminal.wait(lambda text: "is not trusted" in text)
        assert not (file.parent / ".mtmc").exists()
