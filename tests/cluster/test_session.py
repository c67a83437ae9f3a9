"""Jobs on workers of a Dask cluster inside the test process; what they run is still a process of its own."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.app.bench.jobs import Place
from mtmc_lsp.app.bench.runner import Bench, Plan, read_results
from mtmc_lsp.app.bench.suite import find_problems
from mtmc_lsp.cluster.address import ClusterAddress
from mtmc_lsp.cluster.imports import bundle_of
from mtmc_lsp.cluster.machine import CPU, Hardware
from mtmc_lsp.cluster.results import cluster_plan
from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.settings import Settings

distributed = pytest.importorskip("distributed")
from mtmc_lsp.cluster import plugin, session  # noqa: E402
from mtmc_lsp.cluster.session import Session, connect  # noqa: E402

PROBLEM = "import torch\n\nclass Model(torch.nn.Module):\n    pass\n\ndef get_inputs():\n    return []\n"
ANSWER = """
import json, pathlib, sys, time
request = json.load(sys.stdin)
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.search.store import Store
path = pathlib.Path(request["path"])
with Store(pathlib.Path(request["store"])) as store:
    run = store.begin(str(path), "Model", "", Environment("", "", "", "", ""))
time.sleep(0.2)
error = {"message": f"{path} is refused", "path": str(path)}
answer = {"status": "refused", "error": error, "text": path.read_text(), "python": request["python"]}
pathlib.Path(sys.argv[1]).write_text(json.dumps(answer))
"""
PLAN = Plan(Settings(), sys.executable, 20.0, {"torch": "2.13"})


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Six problems."""
    folder = tmp_path / "suite"
    folder.mkdir()
    for number in range(6):
        (folder / f"p{number}.py").write_text(f"{PROBLEM}# {number}\n")
    return folder


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterAddress]:
    """Two workers in threads of this process."""
    options = {"processes": False, "protocol": "tcp://", "dashboard_address": None, "threads_per_worker": 2}
    with distributed.LocalCluster(n_workers=2, local_directory=str(tmp_path / "dask"), **options) as cluster:
        yield ClusterAddress(cluster.scheduler_address)


def opened(cluster: ClusterAddress, suite: Path) -> Any:
    return connect(cluster, bundle_of(find_problems(suite), Settings()), sys.executable, forks=False)


def bench(suite: Path, here: Session, kind: str = CPU) -> Bench:
    plan = cluster_plan(PLAN, here.software, kind)
    return Bench(plan, suite.parent / f"{kind}.jsonl", here.jobs(kind), program=(sys.executable, "-c", ANSWER))


def test_results_and_runs_come_back_with_the_paths_of_the_users_machine(cluster: ClusterAddress, suite: Path) -> None:
    from mtmc_lsp.search.store import Store

    with opened(cluster, suite) as here:
        assert here.kinds == {CPU: 2}
        found = [
            (problem.name, record)
            for problem, record, known in bench(suite, here).run(find_problems(suite))
            if not known
        ]
        assert sorted(name for name, _ in found) == [f"p{number}" for number in range(6)]
        assert all(
            record["text"].startswith(PROBLEM) and record["error"]["path"] == f"{name}.py" for name, record in found
        )
        again = bench(suite, here).run(find_problems(suite))
        assert [known for _, _, known in again] == [True] * 6
    assert len(read_results(suite.parent / "CPU.jsonl")) == 6
    with Store(suite.parent / ".mtmc") as store:
        assert sorted(run.path for run in store.runs()) == sorted(str(path) for path in suite.glob("*.py"))
    assert not list((suite.parent / "dask").rglob("*.pyc"))


def count_together(place: Place, folder: str) -> int:
    """How many jobs of a worker run at the same time, as each of them sees it."""
    mark = Path(folder) / f"{place.slot.device or 'cpu'}-{time.monotonic_ns()}-{threading.get_ident()}"
    mark.touch()
    time.sleep(0.2)
    together = len(list(Path(folder).glob(f"{place.slot.device or 'cpu'}-*")))
    mark.unlink()
    return together


def test_a_gpu_runs_one_job_at_a_time_and_each_kind_has_its_own_jobs(
    cluster: ClusterAddress, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count()
    kinds = ("NVIDIA A100", "NVIDIA H100")
    monkeypatch.setattr(plugin, "hardware", lambda: Hardware(str(n := next(numbers)), kinds[n % 2], ()))
    (tmp_path / "marks").mkdir()
    with opened(cluster, suite) as here:
        assert here.kinds == dict.fromkeys(kinds, 1)
        for kind in kinds:
            jobs = here.jobs(kind)
            assert jobs.count == 1
            # The workers have two threads each.
            futures = [jobs.submit(count_together, str(tmp_path / "marks")) for _ in range(4)]
            assert [jobs.result(future) for future in futures] == [1, 1, 1, 1]
        first, second = (bench(suite, here, kind).run(find_problems(suite)) for kind in kinds)
        keys = [{record["key"] for _, record, _ in results} for results in (first, second)]
        assert len(keys[0] | keys[1]) == 12, "results of another GPU are other results"


def test_a_cancelled_job_ends_its_process(cluster: ClusterAddress, suite: Path, tmp_path: Path) -> None:
    code = f"import os, pathlib, time\npathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    with opened(cluster, suite) as here:
        future = here.jobs(CPU).submit(run_code, code)
        pid = int(awaited(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
        future.cancel()
        assert awaited(lambda: not Path(f"/proc/{pid}").exists())


def run_code(place: Place, code: str) -> object:
    return place.answer((sys.executable, "-c", code), PLAN, 60.0)


def awaited(condition: Any) -> Any:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("the condition never held")


def test_another_version_on_a_worker_is_refused_before_any_job(
    cluster: ClusterAddress, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = plugin.software_of(sys.executable)
    monkeypatch.setattr(plugin, "software_of", lambda python: replace(here, torch="1.0"))
    with pytest.raises(EnvironmentNotAble) as caught, opened(cluster, suite):
        pass
    assert f"has torch 1.0 instead of {here.torch}" in caught.value.message
    assert caught.value.remedy.startswith("Install the same versions for ")


def test_a_worker_without_this_tool_is_refused(
    cluster: ClusterAddress, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PACKAGE", "mtmc_lsp_that_is_not_installed")
    with pytest.raises(EnvironmentNotAble, match="does not have mtmc-lsp") as caught, opened(cluster, suite):
        pass
    assert "pip install 'mtmc-lsp[cluster]'" in caught.value.remedy


def test_a_cluster_without_workers_is_refused_with_the_command_that_starts_one(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "WORKER_SECONDS", 0.5)
    options = {"processes": False, "protocol": "tcp://", "dashboard_address": None}
    with distributed.LocalCluster(n_workers=0, **options) as cluster:
        address = ClusterAddress(cluster.scheduler_address)
        with pytest.raises(EnvironmentNotAble, match="has 0 workers") as caught, opened(address, suite):
            pass
        assert f"dask worker {address.text} --nthreads 1" in caught.value.remedy


def test_an_address_that_does_not_answer_is_reported_within_seconds(suite: Path) -> None:
    began = time.monotonic()
    for address, words in (
        ("tcp://127.0.0.1:1", "the cluster tcp://127.0.0.1:1 does not answer"),
        ("tls://127.0.0.1:1", "tls://127.0.0.1:1 needs Dask's TLS files, and none are configured"),
    ):
        with pytest.raises(EnvironmentNotAble) as caught, opened(ClusterAddress(address), suite):
            pass
        assert caught.value.message.startswith(words)
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_jobs_after_the_end_of_the_cluster_are_an_error_not_a_wait(suite: Path) -> None:
    options = {"processes": False, "protocol": "tcp://", "dashboard_address": None}
    cluster = distributed.LocalCluster(n_workers=1, **options)
    with cluster, opened(ClusterAddress(cluster.scheduler_address), suite) as here:
        jobs = here.jobs(CPU)
        future = jobs.submit(run_code, "import time\ntime.sleep(60)")
        time.sleep(0.5)
        cluster.close()
        with pytest.raises(EnvironmentNotAble, match=r"the connection to the cluster .* was lost"):
            jobs.result(future)
