"""Workers that are copies of one process: as apart from each other as processes of their own, and quick to start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mtmc_lsp.core.errors import TargetRaises, WorkerFailed
from mtmc_lsp.process.fork_server import ForkServer, Launch
from mtmc_lsp.process.worker.fork_server_loop import CAPTURE_MODULES, COMPILER_MODULES
from mtmc_lsp.process.worker_process import Worker
from tests.core.test_worker import plain_request


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer(sys.executable, {"TRITON_INTERPRET": "1"}) as one:
        one.start()
        yield one


def copy_of(fork_server: ForkServer | None, folder: Path, **more) -> Worker:
    return Worker(sys.executable, cwd=str(folder), env={"TRITON_INTERPRET": "1"}, fork_server=fork_server, **more)


def pid_of(fork_server: ForkServer) -> int:
    """The id of the fork server, which is the child of its supervisor."""
    assert fork_server._process is not None
    supervisor = fork_server._process.pid
    while not (children := Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()):
        time.sleep(0.02)
    return int(children[0])


def said(worker: Worker, path: Path, body: str) -> str:
    """What the user's file says of itself when it is imported."""
    with pytest.raises(TargetRaises) as caught:
        worker.call(plain_request(path, body), 60)
    return caught.value.message


def test_a_copy_is_a_process_of_its_own_in_its_own_folder_with_its_own_variables(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_LATER", "yes")
    body = "import os, sys\nsys.seen = getattr(sys, 'seen', 0) + 1\n"
    body += "raise RuntimeError(f'{sys.seen} {os.getcwd()} {os.environ[\"SET_LATER\"]} {sys.stdin.read()!r}')"
    with copy_of(fork_server, tmp_path) as first, copy_of(fork_server, tmp_path) as second:
        for worker in (first, second):
            assert f"1 {tmp_path} yes ''" in said(worker, tmp_path / "m.py", body)


def test_a_copy_starts_at_once(fork_server: ForkServer, tmp_path: Path) -> None:
    with copy_of(fork_server, tmp_path) as worker:
        said(worker, tmp_path / "m.py", "raise RuntimeError")
    begun = time.monotonic()
    with copy_of(fork_server, tmp_path) as worker:
        assert "True" in said(worker, tmp_path / "m.py", "import sys\nraise RuntimeError('torch' in sys.modules)")
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os\nos._exit(7)", "exit code 7"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import os\nos.write(2, b'the last words')\nos.abort()", "SIGABRT.*the last words"),
    ],
)
def test_the_end_of_a_copy_is_told_and_the_next_call_works(
    fork_server: ForkServer, tmp_path: Path, body: str, words: str
) -> None:
    with copy_of(fork_server, tmp_path) as worker:
        with pytest.raises(WorkerFailed, match=words):
            worker.call(plain_request(tmp_path / "m.py", body), 60)
        assert "next" in said(worker, tmp_path / "m.py", "raise RuntimeError('next')")


def test_what_a_copy_leaves_behind_is_ended_even_in_a_session_of_its_own(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    body = "import os, subprocess\nchild = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    body += "open('pid', 'w').write(str(child.pid))\nos._exit(3)"
    with copy_of(fork_server, tmp_path) as worker, pytest.raises(WorkerFailed):
        worker.call(plain_request(tmp_path / "m.py", body), 60)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_later_process_with_the_id_of_a_copy_that_ended_is_not_killed(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    with copy_of(fork_server, tmp_path) as worker:
        said(worker, tmp_path / "m.py", "raise RuntimeError")
        assert worker._process is not None
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait(60)
        later = subprocess.Popen(["sleep", "600"], start_new_session=True)
        worker._process.pid = later.pid
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            later.wait(0.5)
    finally:
        later.kill()
        later.wait()


DEEP = """
import os, sys, time
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            with open("pids", "a") as file:
                file.write(f"{os.getpid()} ")
        time.sleep(600)
while len(open("pids").read().split()) < 20:
    time.sleep(0.01)
"""
"""Starts 40 processes in sessions of their own."""


@pytest.mark.parametrize("forks", [True, False], ids=["forked", "started"])
@pytest.mark.parametrize("end", ["close", "close the fork server", "kill"])
def test_no_process_of_user_code_outlives_its_worker(tmp_path: Path, forks: bool, end: str) -> None:
    with ForkServer(sys.executable, {"TRITON_INTERPRET": "1"}) as fork_server:
        worker = copy_of(fork_server if forks else None, tmp_path)
        said(worker, tmp_path / "m.py", f"{DEEP}raise RuntimeError")
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 20
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        if end == "close the fork server":
            fork_server.close()
        if end == "kill":
            worker.kill()
        else:
            worker.close()
        assert all(gone(pid) for pid in pids)
        worker.close()


def test_without_the_template_its_copies_end_and_others_start_by_themselves(tmp_path: Path) -> None:
    with ForkServer(sys.executable) as lost, Worker(sys.executable, cwd=str(tmp_path), fork_server=lost) as worker:
        pid = int(said(worker, tmp_path / "m.py", "import os\nraise RuntimeError(os.getpid())").split()[-1])
        assert lost._process is not None
        os.kill(lost._process.pid, signal.SIGKILL)
        assert gone(pid)
        assert "again" in said(worker, tmp_path / "m.py", "raise RuntimeError('again')")


AS_WITH_A_GPU = """
import torch
from mtmc_lsp.process.worker.fork_server_loop import CAPTURE_MODULES, COMPILER_MODULES, _preload

def asked(*_):
    print("CUDA was asked")
    return 1

for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_getArchFlags", "_cuda_getDevice", "_cuda_getCurrentRawStream"):
    setattr(torch._C, name, asked)
torch.cuda._is_compiled = lambda: True
import sys
for name in CAPTURE_MODULES + COMPILER_MODULES:
    _preload(name)
    print(name in sys.modules)
torch._C._cuda_getDeviceCount()
"""


def test_nothing_that_is_imported_ahead_asks_cuda_which_could_not_be_asked_again_after_a_fork() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", AS_WITH_A_GPU], capture_output=True, env=environment, text=True)
    assert done.stdout.split("\n") == [*["True"] * len(CAPTURE_MODULES + COMPILER_MODULES), "CUDA was asked", ""], (
        done.stderr
    )


AS_FOR_THE_INTERPRETER = """
import sys
from mtmc_lsp.process.worker.fork_server_loop import CAPTURE_MODULES, _import_torch, _preload
_import_torch()
for name in CAPTURE_MODULES:
    _preload(name)
    print(name in sys.modules)
"""


def test_what_the_interpreter_needs_is_imported_ahead_as_it_would_be_later() -> None:
    """torch's modules import each other: only some orders work."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", AS_FOR_THE_INTERPRETER], capture_output=True, env=environment, text=True
    )
    assert done.stdout.split() == ["True"] * len(CAPTURE_MODULES), done.stderr


WHICH_TRITON = """
import os, triton, triton.language as tl
@triton.jit
def kernel(x):
    tl.store(x, tl.sum(tl.arange(0, 8)))
kinds = [type(f).__name__ for f in (kernel, tl.sum)]
raise RuntimeError(f"{os.getppid()} {os.environ.get('TRITON_INTERPRET')} {kinds}")
"""


def test_a_copy_that_compiles_has_no_interpreter_though_its_template_has(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    for variables, kind in (({}, "JITFunction"), ({"TRITON_INTERPRET": "1"}, "InterpretedFunction")):
        with Worker(sys.executable, cwd=str(tmp_path), env=variables, fork_server=fork_server) as worker:
            words = f"{pid_of(fork_server)} {variables.get('TRITON_INTERPRET')} {[kind] * 2}"
            assert words in said(worker, tmp_path / "m.py", WHICH_TRITON)


@pytest.mark.parametrize("launch", [{"python": f"{sys.executable}3"}, {"env": {"TRITON_INTERPRET": "2"}}])
def test_a_copy_is_not_made_for_another_interpreter_or_other_variables(fork_server: ForkServer, launch) -> None:
    fitting = {"python": sys.executable, "cwd": "/", "env": {"TRITON_INTERPRET": "1"}, "options": ()}
    assert fork_server.can_fork(Launch(**fitting))
    assert not fork_server.can_fork(Launch(**{**fitting, **launch}))


def test_a_worker_that_interprets_kernels_is_no_copy_of_a_process_that_compiles_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's functions, such as ``tl.max``, are compiled or interpreted from its import on."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    launch = Launch(python=sys.executable, cwd="/", env={"TRITON_INTERPRET": "1"}, options=())
    assert not ForkServer(sys.executable).can_fork(launch)
    assert ForkServer(sys.executable).can_fork(replace(launch, env={}))


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    state = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        try:
            if state.read_text().split()[2] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


BORROWER = """
import json, os, sys
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.process.fork_server import INTERPRETER_ENV, ForkServer
from mtmc_lsp.process.worker_process import Worker
from tests.core.test_worker import plain_request
from pathlib import Path

folder, body = Path(sys.argv[1]), sys.argv[2]
fork_server = ForkServer(sys.executable, INTERPRETER_ENV)
worker = Worker(sys.executable, cwd=str(folder), env=INTERPRETER_ENV, fork_server=fork_server)
for number in range(2):
    try:
        worker.call(plain_request(folder / f"m{number}.py", body), 60)
    except MtmcError as error:
        print(error.message.splitlines()[0], flush=True)
sys.stdin.readline()
fork_server.close()
sys.stdin.readline()
"""
WHOSE = "import os\nraise RuntimeError(f\"{os.getpid()} of {os.getppid()} {'MTMC_FORK_SERVER' in os.environ} {len(os.listdir('/proc/self/fd'))}\")"


@contextmanager
def borrowing(
    fork_server: ForkServer, folder: Path, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that borrows the template, after two calls of one worker; gives what they said of theirs."""
    root = str(Path(__file__).resolve().parents[2])
    with fork_server.lend() as (offer, files):
        process = subprocess.Popen(
            [sys.executable, "-c", BORROWER, str(folder), WHOSE],
            cwd=root,
            env={**os.environ, **offer, **variables},
            pass_fds=files,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert process.stdout is not None
    try:
        yield process, [process.stdout.readline() for _ in range(2)]
    finally:
        process.kill()
        process.communicate()


def numbers(line: str) -> tuple[int, int]:
    """A process and its parent."""
    found = re.search(r"(\d+) of (\d+) False", line)
    assert found is not None, line
    return int(found[1]), int(found[2])


def test_a_lent_template_is_copied_by_another_process_and_outlives_it(fork_server: ForkServer, tmp_path: Path) -> None:
    ours = str(pid_of(fork_server))
    with borrowing(fork_server, tmp_path) as (borrower, lines), copy_of(fork_server, tmp_path) as kept:
        copies = {numbers(line)[0] for line in lines}
        assert {numbers(line)[1] for line in lines} == {pid_of(fork_server)}
        own, _ = numbers(said(kept, tmp_path / "own.py", WHOSE))
        borrower.kill()
        assert all(gone(pid) for pid in copies), "with the borrower's end, though their parent goes on"
        assert f"{own} of {ours}" in said(kept, tmp_path / "again.py", WHOSE), "what was made for others is not theirs"
    with copy_of(fork_server, tmp_path) as another:
        assert f" of {ours} " in said(another, tmp_path / "another.py", WHOSE)


def test_a_borrower_that_closes_it_ends_its_own_copies_alone(fork_server: ForkServer, tmp_path: Path) -> None:
    with borrowing(fork_server, tmp_path) as (borrower, lines), copy_of(fork_server, tmp_path) as kept:
        own, _ = numbers(said(kept, tmp_path / "own.py", WHOSE))
        assert borrower.stdin is not None
        borrower.stdin.write("\n")
        borrower.stdin.flush()
        assert all(gone(numbers(line)[0]) for line in lines)
        assert borrower.poll() is None
        assert f"{own} of " in said(kept, tmp_path / "again.py", WHOSE)


def test_a_template_that_would_be_another_is_not_borrowed(fork_server: ForkServer, tmp_path: Path) -> None:
    """Where modules are found is decided when an interpreter starts, so a copy would find others."""
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with fork_server.lend() as (offer, _):
        assert offer
    with borrowing(fork_server, tmp_path, PYTHONPATH=path) as (_, lines):
        parents = {re.search(r" of (\d+) ", line)[1] for line in lines}  # type: ignore[index]
    assert parents and str(pid_of(fork_server)) not in parents


def test_copies_hold_no_line_on_which_others_could_be_asked_for(fork_server: ForkServer, tmp_path: Path) -> None:
    body = (
        "import os\nfolder = '/proc/self/fd'\nplaces = [f'{folder}/{n}' for n in os.listdir(folder)]\n"
        "links = [os.readlink(place) for place in places if os.path.islink(place)]\n"
        "raise RuntimeError([link for link in links if link.startswith('socket')])"
    )
    with fork_server.lend() as (_, files), copy_of(fork_server, tmp_path) as worker:
        assert files
        assert "imported: []" in said(worker, tmp_path / "m.py", body)


def branch_of(fork_server: ForkServer, folder: Path, imported: str, imports: str) -> ForkServer:
    """A branch for a file that imports a module of its folder, which counts how often it is imported."""
    count = f"open({str(folder / 'count')!r}, 'a').write('x')\n"
    (folder / "dependency.py").write_text(count + imported)
    file = folder / "users_file.py"
    file.write_text(imports)
    return fork_server.branch(str(file), str(folder))


def imported_and_parent(worker: Worker, folder: Path) -> tuple[int, int]:
    """How often the dependency was imported after a worker imported it too, and the worker's parent."""
    message = said(worker, folder / "m.py", "import os, dependency\nraise RuntimeError(f'parent {os.getppid()}')")
    parent = re.search(r"parent (\d+)", message)
    assert parent is not None, message
    return len((folder / "count").read_text()), int(parent[1])


IMPORTS = [
    "import dependency",
    "try:\n    from dependency import missing\nexcept ImportError:\n    pass",
    "import dependency\nimport no_such_module\nraise SystemExit('the file itself does not run')",
]


@pytest.mark.parametrize("imports", IMPORTS)
def test_workers_of_a_branch_need_not_import_what_the_users_file_imports(
    fork_server: ForkServer, tmp_path: Path, imports: str
) -> None:
    with branch_of(fork_server, tmp_path, "", imports) as branch:
        for _ in range(2):
            with copy_of(branch, tmp_path) as worker:
                count, parent = imported_and_parent(worker, tmp_path)
                assert count == 1
                assert parent != pid_of(fork_server)
    assert gone(parent)


UNFIT = {
    "a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "CUDA": "import torch\ntry:\n    torch.cuda._lazy_init()\nexcept Exception:\n    pass",
    "its own end": "import os\nif os.environ.get('MTMC_SCRATCH') is None:\n    os._exit(0)",
}


@pytest.mark.parametrize("imported", UNFIT.values(), ids=UNFIT)
def test_a_file_whose_imports_do_not_survive_a_fork_is_imported_by_each_worker(
    fork_server: ForkServer, tmp_path: Path, imported: str
) -> None:
    with branch_of(fork_server, tmp_path, imported, "import dependency") as branch, copy_of(branch, tmp_path) as worker:
        assert imported_and_parent(worker, tmp_path) == (2, pid_of(fork_server))


def test_a_worker_that_compiles_is_not_forked_from_a_branch_with_the_interpreter(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    with (
        branch_of(fork_server, tmp_path, "import triton", "import dependency") as branch,
        Worker(sys.executable, cwd=str(tmp_path), env={}, fork_server=branch) as worker,
    ):
        words = f"{pid_of(fork_server)} None {['JITFunction'] * 2}"
        assert words in said(worker, tmp_path / "m.py", WHICH_TRITON)


def test_the_workers_of_a_branch_end_with_it_and_those_of_its_base_do_not(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    branch = branch_of(fork_server, tmp_path, "", "import dependency")
    with copy_of(branch, tmp_path) as ended, copy_of(fork_server, tmp_path) as kept:
        pid, _ = numbers(said(ended, tmp_path / "ended.py", WHOSE))
        own, _ = numbers(said(kept, tmp_path / "own.py", WHOSE))
        branch.kill()
        assert gone(pid)
        assert f"{own} of " in said(kept, tmp_path / "again.py", WHOSE)
    branch.close()
