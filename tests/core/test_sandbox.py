"""A process that locks itself in cannot do what a dishonest candidate would like to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtmc_lsp.process import sandbox
from mtmc_lsp.process.sandbox import Isolation

ATTEMPTS = {
    "writes to the home folder": "open({home!r} + '/x', 'w')",
    "changes a file there": "open({home!r} + '/held', 'a')",
    "removes a file there": "os.remove({home!r} + '/held')",
    "makes a folder there": "os.mkdir({home!r} + '/d')",
    "reads what is expected": "open({secret!r} + '/expected').read()",
    "lists what is expected": "os.listdir({secret!r})",
    "opens a socket": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "opens a socket of version 6": "socket.socket(socket.AF_INET6)",
    "starts a process that does": "subprocess.run(['sh', '-c', 'echo x > {home}/x'], check=True, stderr=-3)",
    "reads the memory of its parent": "open('/proc/%d/mem' % os.getppid(), 'rb')",
}
ALLOWED = {
    "writes to its own folder": "open({own!r} + '/x', 'w')",
    "throws output away": "open('/dev/null', 'w')",
    "reads the home folder": "open({home!r} + '/held').read()",
    "has local sockets": "socket.socketpair()",
    "starts a process": "subprocess.run(['true'], check=True)",
}


ALONE = {
    "starts a program": "subprocess.run(['true'], check=True)",
    "forks": "os.fork() or os._exit(0)",
    "becomes a program": "os.execv('/bin/true', ['true'])",
    "has a local socket that can reach others": "socket.socket(socket.AF_UNIX)",
}
"""What a process that needs no programs may not do either."""


def _tried(tmp_path: Path, attempt: str, more: str = "") -> bool:
    """Whether the attempt succeeds in a process that is locked in."""
    folders = {name: str(tmp_path / name) for name in ("home", "own", "secret")}
    for folder in folders.values():
        Path(folder).mkdir()
    (tmp_path / "home" / "held").write_text("mine")
    (tmp_path / "secret" / "expected").write_text("42")
    code = f"""
import os, socket, subprocess, sys
sys.path.insert(0, {os.path.dirname(sandbox.__file__)!r})
from sandbox import enter
assert enter([{folders["own"]!r}], {folders["secret"]!r}{more}).is_full
try:
    {attempt.format(**folders)}
except (OSError, subprocess.CalledProcessError) as error:
    print("refused")
else:
    print("done")
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip() == "done"


@pytest.fixture(scope="module")
def able() -> None:
    done = subprocess.run([sys.executable, "-I", sandbox.__file__], capture_output=True, text=True, check=True)
    if not done.stdout.startswith("full"):
        pytest.skip(f"this kernel cannot: {done.stdout.strip()}")


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_what_is_not_its_own_is_out_of_reach(attempt: str, tmp_path: Path) -> None:
    assert not _tried(tmp_path, ATTEMPTS[attempt], ", programs=True")


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("work", ALLOWED)
def test_honest_work_goes_on(work: str, tmp_path: Path) -> None:
    assert _tried(tmp_path, ALLOWED[work], ", programs=True")


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("attempt", ALONE)
def test_what_needs_no_programs_starts_none(attempt: str, tmp_path: Path) -> None:
    assert not _tried(tmp_path, ALONE[attempt])


@pytest.mark.usefixtures("able")
def test_threads_start_where_processes_do_not(tmp_path: Path) -> None:
    work = (
        "import threading; seen = []; t = threading.Thread(target=seen.append, args=(1,)); t.start(); t.join(); seen[0]"
    )
    assert _tried(tmp_path, work)


@pytest.mark.usefixtures("able")
def test_a_process_with_a_gpu_writes_to_devices_of_gpus_alone(tmp_path: Path) -> None:
    """Other devices, disks among them, stay as unreachable as files."""
    assert not _tried(tmp_path, "open('/dev/mtmc-no-device', 'w')", ", gpu=True")
    (tmp_path / "again").mkdir()
    assert _tried(
        tmp_path / "again",
        "open('/dev/null', 'w').close(); open('/dev/shm/mtmc-' + str(os.getpid()), 'w').close(); os.remove('/dev/shm/mtmc-' + str(os.getpid()))",
        ", gpu=True",
    )


def test_what_is_missing_is_said() -> None:
    assert Isolation().text.startswith("none")
    assert Isolation(files=True).text == "partial: read-only files only"
    assert not Isolation(network=True).is_full
    assert Isolation(True, True).text.startswith("full")
    assert "CUDA does not start" in Isolation(gpu="no device").text
