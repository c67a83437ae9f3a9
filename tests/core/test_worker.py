"""A worker's hang, crash or exhaustion is one clear error, and the next call works."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mtmc_lsp.capture.messages import CaptureRequest
from mtmc_lsp.core.errors import EnvironmentNotAble, FailureKind, MtmcError, OutOfMemory, TargetRaises, WorkerFailed
from mtmc_lsp.process.gpu_lock import alone, lock_folder
from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.protocol import GpuLock, NoAnswer, Request
from mtmc_lsp.process.worker_process import ENTRY, OUTPUT_TAIL_BYTES, SCRATCH, Worker
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive

GOOD = "import torch\nprint('noise on stdout')\n# mtmc: x=f32[4,8]\ndef f(x):\n    return x + 1\n"


def request(path: Path, text: str) -> CaptureRequest:
    path.write_text(text)
    target = find_target(text.encode(), str(path), "f")
    workload = parse_directive(text.encode(), target, str(path))
    assert workload is not None
    return CaptureRequest(workload, {})


def plain_request(path: Path, body: str) -> CaptureRequest:
    """A file that does something at import."""
    return request(path, f"{body}\n# mtmc: x=f32[4,8]\ndef f(x):\n    return x\n")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory):
    with Worker(sys.executable, cwd=str(tmp_path_factory.mktemp("cwd"))) as one:
        yield one


def test_user_code_that_prints_does_not_disturb_the_answers(worker: Worker, tmp_path: Path) -> None:
    answer = worker.call(request(tmp_path / "m.py", GOOD), 100)
    assert answer.graph.nodes[0].op == "aten.add.Tensor"


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("import os\nos._exit(7)", FailureKind.CRASHED, "exit code 7"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", FailureKind.CRASHED, "SIGSEGV"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", FailureKind.KILLED, "was killed by signal SIGKILL"),
        ("import os\nos.write(2, b'the last words')\nos.abort()", FailureKind.CRASHED, "SIGABRT.*the last words"),
        # Something that outlives the process must not keep us waiting for it.
        (
            "import os, subprocess\nsubprocess.Popen(['sleep', '30'], start_new_session=True)\nos._exit(3)",
            FailureKind.CRASHED,
            "exit code 3",
        ),
        ("import os, time\nif os.fork() == 0:\n    time.sleep(30)\nos._exit(3)", FailureKind.CRASHED, "exit code 3"),
    ],
)
def test_a_crash_is_told_and_the_next_call_works(
    worker: Worker, tmp_path: Path, body: str, kind: FailureKind, words: str
) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match=words) as caught:
        worker.call(plain_request(tmp_path / "bad.py", body), 100)
    assert caught.value.kind is kind
    assert time.monotonic() - started < 25


def test_a_hang_ends_at_the_time_limit_with_all_that_it_started(tmp_path: Path) -> None:
    body = "import subprocess, time\nopen('pid', 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\ntime.sleep(60)"
    with Worker(sys.executable, cwd=str(tmp_path)) as worker:
        with pytest.raises(WorkerFailed, match="took longer than") as caught:
            worker.call(plain_request(tmp_path / "bad.py", body), 12)
        assert caught.value.kind is FailureKind.TIMEOUT
        assert caught.value.remedy
        assert worker.call(request(tmp_path / "good.py", GOOD), 100)
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_child_that_does_not_read_its_request_is_ended_too(tmp_path: Path) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 30\n")
    sleeper.chmod(0o755)
    with Worker(str(sleeper), cwd=str(tmp_path)) as worker, pytest.raises(WorkerFailed) as caught:
        worker.call(plain_request(tmp_path / "m.py", "x" * 1_000_000), 1)
    assert caught.value.kind is FailureKind.TIMEOUT


def test_an_answer_that_is_not_json_is_a_bad_answer(tmp_path: Path) -> None:
    talker = tmp_path / "python"
    talker.write_text(
        f"#!{sys.executable}\nimport os, sys\nsys.stdin.readline()\nos.write(int(sys.argv[3]), b'nonsense\\n')\n"
    )
    talker.chmod(0o755)
    with Worker(str(talker), cwd=str(tmp_path)) as worker, pytest.raises(WorkerFailed, match="not JSON") as caught:
        worker.call(StartRequest(gpu=False), 5)
    assert caught.value.kind is FailureKind.BAD_ANSWER


def test_an_answer_that_was_not_asked_for_is_not_taken(tmp_path: Path) -> None:
    """Whatever user code writes to the pipe by itself lacks what the request brought along."""
    forger = tmp_path / "python"
    answer = b'{"result": {"status": "ran"}}\n'
    forger.write_text(
        f"#!{sys.executable}\nimport os, sys\nsys.stdin.readline()\nos.write(int(sys.argv[3]), {answer!r})\n"
    )
    forger.chmod(0o755)
    with (
        Worker(str(forger), cwd=str(tmp_path)) as worker,
        pytest.raises(WorkerFailed, match="does not carry the token") as caught,
    ):
        worker.call(StartRequest(gpu=False), 5)
    assert caught.value.kind is FailureKind.BAD_ANSWER


@pytest.mark.parametrize("left", ["link", "folder", "pipe", "nothing"])
def test_only_a_plain_file_is_taken_from_a_child(worker: Worker, tmp_path: Path, left: str) -> None:
    """A link might lead to what is expected, and opening a pipe might wait for ever."""
    makes = {
        "link": "os.symlink('/etc/passwd', path)",
        "folder": "os.mkdir(path)",
        "pipe": "os.mkfifo(path)",
        "nothing": "pass",
    }
    body = (
        f"import os\npath = os.path.join(os.environ['{SCRATCH}'], '{left}')\n{makes[left]}\nraise RuntimeError('made')"
    )
    with pytest.raises(TargetRaises, match="made"):
        worker.call(plain_request(tmp_path / "m.py", body), 60)
    with pytest.raises(WorkerFailed, match="did not write"):
        worker.copy_file(left, tmp_path / "taken")


def test_a_call_can_be_cancelled_from_another_thread(tmp_path: Path) -> None:
    with Worker(sys.executable, cwd=str(tmp_path)) as worker:
        threading.Timer(2.0, worker.kill).start()
        with pytest.raises(WorkerFailed) as caught:
            worker.call(plain_request(tmp_path / "m.py", "import time\ntime.sleep(60)"), 100)
    assert caught.value.kind is FailureKind.CANCELLED


def test_memory_beyond_the_limit_is_out_of_memory_and_the_next_call_works(tmp_path: Path) -> None:
    with Worker(sys.executable, cwd=str(tmp_path), memory_bytes=4 << 30) as worker:
        with pytest.raises(OutOfMemory) as caught:
            worker.call(plain_request(tmp_path / "m.py", "x = bytearray(6 << 30)"), 100)
        assert caught.value.remedy
        hungry = GOOD.replace("    return", "    y = torch.ones(1 << 31)\n    return")
        with pytest.raises(OutOfMemory) as caught:
            worker.call(request(tmp_path / "m.py", hungry), 100)
        assert caught.value.where is not None
        assert worker.call(request(tmp_path / "good.py", GOOD), 100)


def test_what_user_code_raises_names_its_line(worker: Worker, tmp_path: Path) -> None:
    bad = "import torch\n# mtmc: x=f32[4,8]\ndef f(x):\n    y = x.sum()\n    return x @ x\n"
    with pytest.raises(TargetRaises) as caught:
        worker.call(request(tmp_path / "m.py", bad), 100)
    assert caught.value.where is not None
    assert caught.value.where.line == 5


def test_a_file_that_exits_when_imported_is_an_error_of_the_file(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(TargetRaises, match="SystemExit"):
        worker.call(plain_request(tmp_path / "m.py", "import sys\nsys.exit(1)"), 100)


def test_an_interpreter_that_is_not_there_is_an_environment_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentNotAble, match="no-such-python") as caught:
        Worker(str(tmp_path / "no-such-python"), cwd=str(tmp_path)).call(StartRequest(gpu=False), 5)
    assert "--python" in caught.value.remedy


@dataclass(frozen=True)
class UnknownRequest(Request[NoAnswer], command="no.such.command"):
    pass


def test_a_command_that_does_not_exist_is_an_error_and_not_a_crash(worker: Worker) -> None:
    with pytest.raises(MtmcError, match="internal error"):
        worker.call(UnknownRequest(), 20)


def test_only_the_end_of_what_user_code_prints_is_kept(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="the end"):
        worker.call(
            plain_request(
                tmp_path / "m.py", "import os\nprint('x' * 5_000_000)\nprint('the end', flush=True)\nos._exit(1)"
            ),
            100,
        )
    assert len(worker.output()) <= OUTPUT_TAIL_BYTES


def test_the_scratch_folder_goes_with_the_worker(tmp_path: Path) -> None:
    body = f"import os\nraise RuntimeError(os.environ['{SCRATCH}'])"
    with Worker(sys.executable, cwd=str(tmp_path)) as worker:
        with pytest.raises(TargetRaises) as caught:
            worker.call(plain_request(tmp_path / "m.py", body), 100)
        scratch = Path(caught.value.message.rpartition(" ")[2])
        assert scratch.is_dir()
    assert not scratch.exists()


def test_a_worker_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, os, time\n"
        "r, w = os.pipe()\n"
        f"child = subprocess.Popen([sys.executable, {str(ENTRY)!r}, '--answers', str(w)], pass_fds=(w,),"
        " stdin=subprocess.PIPE, start_new_session=True)\n"
        "child.stdin.write(b' ')\nchild.stdin.flush()\n"
        "holder = os.fork()\n"  # keeps the worker's standard input open, so only the watch can end it
        "if holder == 0:\n    time.sleep(30)\n    os._exit(0)\n"
        "print(child.pid, holder, flush=True)\ntime.sleep(1.5)\nos._exit(0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, holder = map(int, parent.stdout.readline().split())
    try:
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.kill(holder, 9)


def test_the_time_limit_of_a_call_begins_when_the_worker_has_the_gpu_lock(worker: Worker) -> None:
    gpu = "test-of-limits"
    lock = GpuLock(gpu, lock_folder(gpu))
    worker.call(StartRequest(gpu=False), 60)
    began = time.monotonic()
    with alone(gpu):
        timer = threading.Timer(3.0, lambda: None)
        timer.start()
        answers: list[object] = []
        call = threading.Thread(target=lambda: answers.append(worker.call(StartRequest(gpu=False), 2, lock)))
        call.start()
        timer.join()
        assert call.is_alive()
    call.join(30)
    assert answers
    assert time.monotonic() - began > 3


def test_a_call_that_waits_for_the_gpu_lock_ends_with_the_run(worker: Worker) -> None:
    gpu = "test-of-ends"
    lock = GpuLock(gpu, lock_folder(gpu))
    with alone(gpu), pytest.raises(WorkerFailed) as caught:
        worker.call(StartRequest(gpu=False), 60, lock, time.monotonic() + 0.5)
    assert caught.value.kind is FailureKind.TIMEOUT
    worker.call(StartRequest(gpu=False), 60, lock)
