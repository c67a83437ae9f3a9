"""What nobody waits for at the keyboard lets the editor go first, and jobs share the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.priority import JOBS_PER_CORE, MIN_CORES, NICENESS, SESSION_PRIORITY, cores_for_job
from mtmc_lsp.process.worker_process import Worker

SAID = """
import os
from mtmc_lsp.process.priority import has_low_priority, lower_priority
before = has_low_priority()
lower_priority()
lower_priority()
print(before, has_low_priority(), os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) > 0, reason="these tests give way already")
def test_giving_way_twice_is_giving_way_once() -> None:
    out = subprocess.check_output([sys.executable, "-c", SAID], text=True, start_new_session=True)
    assert out.split() == ["False", "True", str(NICENESS)]


@pytest.mark.skipif(not Path(SESSION_PRIORITY).exists(), reason="this kernel does not share out by session")
def test_a_low_priority_worker_lowers_the_priority_of_its_session(tmp_path: Path) -> None:
    with Worker(sys.executable, cwd=str(tmp_path), low_priority=True) as worker:
        worker.call(StartRequest(gpu=False), 60)
        assert worker._process is not None
        process = worker._process.pid
        assert Path(f"/proc/{process}/autogroup").read_text().split()[-1] == str(NICENESS)
        assert os.getpriority(os.PRIO_PROCESS, process) == NICENESS


@given(st.integers(1, 64), st.integers(1, 256))
def test_jobs_share_the_cores_evenly(jobs: int, count: int) -> None:
    cores = list(range(100, 100 + count))
    shares = [cores_for_job(job, jobs, cores) for job in range(jobs)]
    assert all(share == sorted(set(share)) and len(share) >= min(MIN_CORES, count) for share in shares)
    assert jobs == 1 or sum(map(len, shares)) <= max(JOBS_PER_CORE * count + jobs, jobs * MIN_CORES)
    used = Counter(core for share in shares for core in share)
    assert set(used) <= set(cores)
    assert len(used) == min(count, sum(map(len, shares))) or jobs * MIN_CORES > count
    assert max(used.values()) - min(used.values()) <= 2


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not say where a process may run")
def test_what_a_process_starts_keeps_to_its_cores() -> None:
    """A forked worker too, whose fork server started before."""
    text = """
import os, sys, time
from mtmc_lsp.process.priority import limit_to_cores, usable_cores
from mtmc_lsp.process.fork_server import ForkServer, Launch
with ForkServer(sys.executable) as server:
    server.start()
    one = usable_cores()[-1:]
    limit_to_cores(one)
    read, write = os.pipe()
    requests, asking = os.pipe()
    worker = server.fork(Launch(sys.executable, os.getcwd(), {}, ()), (requests, write, write))
    until = time.monotonic() + 30
    while one != sorted(os.sched_getaffinity(worker.pid)) and time.monotonic() < until:
        time.sleep(0.01)
    print(one == sorted(os.sched_getaffinity(worker.pid)))
"""
    assert subprocess.check_output([sys.executable, "-c", text], text=True).split() == ["True"]


def test_torch_computes_with_as_many_threads_as_there_are_cores_to_limit_to_cores() -> None:
    text = """
import os, torch
from mtmc_lsp.process.worker.fork_server_loop import _limit_to_cores
torch.set_num_threads(4)
cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
_limit_to_cores(cores[:1])
print(torch.get_num_threads())
"""
    assert subprocess.check_output([sys.executable, "-c", text], text=True).split() == ["1"]
