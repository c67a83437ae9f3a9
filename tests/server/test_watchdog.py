"""After its client, no process of the server is left, even if the server is stopped or stuck."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from editor import FAKE
from test_cancel import is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LIMIT = 20.0
"""Seconds. On an idle machine, a server ends within five."""
CLIENT = """\
import json, os, subprocess, sys, time

requests, ours = os.pipe()
server = subprocess.Popen(sys.argv[2:], stdin=requests, stdout=subprocess.PIPE)
os.close(requests)
if sys.argv[1] == "shared":
    subprocess.Popen(["sleep", "30"], pass_fds=[ours], env={})

def send(**message):
    body = json.dumps({"jsonrpc": "2.0", **message}).encode()
    os.write(ours, b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)

params = {"processId": os.getpid() if sys.argv[1] != "unknown" else None, "capabilities": {}, "rootUri": None,
          "initializationOptions": {"trusted": True}}
send(id=1, method="initialize", params=params)
server.stdout.readline()
send(method="initialized", params={})
text = "# fake f: sleep\\nimport torch\\n\\n\\n# mtmc: x=f32[8]\\ndef f(x):\\n    return torch.relu(x)\\n"
open("model.py", "w").write(text)
uri = "file://" + os.path.abspath("model.py")
document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
send(method="textDocument/didOpen", params={"textDocument": document})
send(id=2, method="workspace/executeCommand", params={"command": "mtmc.optimize", "arguments": [{"uri": uri, "target": "f"}]})
print(server.pid, flush=True)
while server.stdout.readline():
    pass
"""
STUCK = """\
import subprocess, time
from mtmc_lsp.process.watchdog import start_watchdog

start_watchdog(None)
subprocess.Popen(["sleep", "60"], start_new_session=True)
print(flush=True)
while True:
    time.sleep(60)
"""


@pytest.fixture
def mark() -> Iterator[str]:
    """A text in the environment of the test's processes."""
    text = f"MTMC_TEST_{uuid.uuid4().hex}"
    yield text
    for process in _marked(text):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _marked(mark: str) -> set[int]:
    """The processes with the mark that are alive."""
    processes = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and is_alive(int(folder.name)):
                processes.add(int(folder.name))
    return processes


def _client(mark: str, folder: Path, kind: str) -> tuple[subprocess.Popen[str], int]:
    """A client whose server has started a run, and the server's process."""
    command = [sys.executable, "-c", CLIENT, kind, *FAKE]
    client = subprocess.Popen(command, env={**os.environ, mark: "1"}, stdout=subprocess.PIPE, text=True, cwd=folder)
    assert client.stdout is not None
    server = int(client.stdout.readline())
    # The client, the server, its watchdog, and a job with its supervisor.
    _until(lambda: len(_marked(mark)) >= 5, 120, mark)
    return client, server


def _commands(mark: str) -> list[str]:
    """The command lines of the processes with the mark."""
    return [Path(f"/proc/{process}/cmdline").read_text() for process in _marked(mark)]


def _until(condition: Callable[[], bool], seconds: float, mark: str) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, _commands(mark)
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("kind", ["alone", "shared", "unknown"])
@pytest.mark.parametrize("stopped", ["server", "everything that it started"])
def test_a_stopped_server_ends_after_its_client(mark: str, tmp_path: Path, kind: str, stopped: str) -> None:
    """Also if another process holds its standard input open, or if the client's process is unknown."""
    client, server = _client(mark, tmp_path, kind)
    for process in {server, *(_descendants(server) if stopped != "server" else ())}:
        os.kill(process, signal.SIGSTOP)
    client.kill()
    client.wait()
    took = _until(lambda: not _marked(mark), LIMIT, mark)
    print(f"{took:.2f} s")


def _descendants(process: int) -> set[int]:
    from test_cancel import descendants

    return set(descendants(process))


def test_a_stopped_server_stays_while_its_client_exists(mark: str, tmp_path: Path) -> None:
    client, server = _client(mark, tmp_path, "alone")
    os.kill(server, signal.SIGSTOP)
    time.sleep(1.5)
    assert is_alive(server)
    os.kill(server, signal.SIGCONT)
    client.kill()
    client.wait()
    _until(lambda: not _marked(mark), LIMIT, mark)


def test_a_stuck_server_ends_after_its_client(mark: str) -> None:
    stuck = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        env={**os.environ, mark: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert stuck.stdin is not None and stuck.stdout is not None
    stuck.stdout.readline()
    assert len(_marked(mark)) == 3, "the server, its child, and the watchdog"
    _until(lambda: sum("watchdog.py" in command for command in _commands(mark)) == 1, 30, mark)
    assert sum("start_watchdog" in command for command in _commands(mark)) == 1, "only the server has its command line"
    stuck.stdin.close()
    assert stuck.wait(LIMIT) == -signal.SIGKILL
    _until(lambda: not _marked(mark), LIMIT, mark)


def test_the_watchdog_ends_with_the_server(mark: str) -> None:
    stuck = subprocess.Popen(
        [sys.executable, "-c", STUCK.replace("subprocess.Popen", "# ")],
        env={**os.environ, mark: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert stuck.stdout is not None
    stuck.stdout.readline()
    stuck.kill()
    assert stuck.stdout.read() == b"", "the watchdog holds no end of the server's pipes"
    stuck.wait()
    _until(lambda: not _marked(mark), 30, mark)
