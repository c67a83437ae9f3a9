"""Services on workers of a Dask cluster: copies of the user's files, one process per worker, lost workers."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from services import program

from mtmc_lsp.app.bench.suite import find_problems
from mtmc_lsp.app.remote.messages import Opening
from mtmc_lsp.app.remote.target import answer_request
from mtmc_lsp.app.target_file import open_target, parse_request
from mtmc_lsp.cluster.address import ClusterAddress
from mtmc_lsp.cluster.imports import bundle_of
from mtmc_lsp.cluster.machine import CPU, Hardware
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.settings import Settings

distributed = pytest.importorskip("distributed")
from mtmc_lsp.cluster import plugin  # noqa: E402
from mtmc_lsp.cluster.opening import open_remote  # noqa: E402
from mtmc_lsp.cluster.session import connect  # noqa: E402

MODEL = "import torch\n\n\n# mtmc: x=f32[N,64] N=48\ndef f(x):\n    return torch.relu(x)\n"
READING = """
import pathlib
def answer(opening, command, data):
    marks = pathlib.Path(data)
    (marks / f"{os.getpid()}-{time.monotonic_ns()}").touch()
    while len(list(marks.iterdir())) < 2:
        time.sleep(0.02)
    path = pathlib.Path(opening["path"])
    return {"pid": os.getpid(), "path": str(path), "text": path.read_text(), "writable": os.access(path, os.W_OK)}
"""
KILLING = """
import pathlib, signal
WORKER = int(os.environ["MTMC_PARENT"])
def answer(opening, command, data):
    mark = pathlib.Path(data)
    if not mark.exists():
        mark.write_text(str(WORKER))
        os.kill(WORKER, signal.SIGKILL)
        time.sleep(600)
    return WORKER
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A project with one target."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    (folder / "model.py").write_text(MODEL)
    return folder / "model.py"


@pytest.fixture
def local(tmp_path: Path) -> Any:
    """Starts a cluster with two workers in threads of this process."""
    options = {"processes": False, "protocol": "tcp://", "dashboard_address": None, "threads_per_worker": 2}
    with distributed.LocalCluster(n_workers=2, local_directory=str(tmp_path / "dask"), **options) as cluster:
        yield ClusterAddress(cluster.scheduler_address)


def asked(jobs: Any, answer: str, model: Path, data: object) -> Any:
    opening = to_json(Opening(str(model), "f", sys.executable, Settings()))
    return jobs.submit(answer_request, program(answer), opening, "work", data, 120.0)


def test_a_service_reads_a_copy_and_answers_with_the_paths_of_the_users_machine(
    local: ClusterAddress, model: Path, tmp_path: Path
) -> None:
    files = bundle_of(find_problems(model.parent), Settings())
    with connect(local, files, sys.executable, forks=False) as here:
        jobs, pids = here.jobs(CPU), list[set[int]]()
        for number in range(2):
            marks = tmp_path / f"marks{number}"
            marks.mkdir()
            futures = [asked(jobs, READING, model, str(marks)) for _ in range(2)]
            answers = [jobs.result(future)["result"] for future in futures]
            assert [answer["path"] for answer in answers] == [str(model)] * 2
            assert [answer["text"] for answer in answers] == [MODEL] * 2
            pids.append({answer["pid"] for answer in answers})
        assert len(pids[0]) == 2, "each worker has a process"
        # The folder of marks is part of the request, not of what a service opens.
        assert pids[0] == pids[1], "which answers all requests about a target"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids[0])


def test_a_cluster_with_several_kinds_of_gpus_is_refused_for_a_run(
    local: ClusterAddress, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count()
    kinds = ("NVIDIA A100", "NVIDIA H100")
    monkeypatch.setattr(plugin, "hardware", lambda: Hardware(str(n := next(numbers)), kinds[n % 2], ()))
    target = open_target(parse_request(f"{model}::f", Settings(), sys.executable))
    with (
        pytest.raises(RequestError, match="1 x NVIDIA A100, 1 x NVIDIA H100") as caught,
        open_remote(local.text, target),
    ):
        pass
    assert caught.value.remedy == "Start a cluster whose workers have the same GPU."


@pytest.mark.slow
def test_the_request_of_a_killed_worker_is_answered_by_another(model: Path, tmp_path: Path) -> None:
    files = bundle_of(find_problems(model.parent), Settings())
    with connect(ClusterAddress("local:2", 2), files, sys.executable, forks=False) as here:
        jobs = here.jobs(CPU)
        answer = jobs.result(asked(jobs, KILLING, model, str(tmp_path / "killed")))
        assert answer["result"] != int((tmp_path / "killed").read_text())
