"""The workers of a run share the GPU's memory: each returns what it does not use, and more when another one has none."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from handwritten import RMS

from mtmc_lsp.core.errors import FailureKind, OutOfMemory, WorkerFailed
from mtmc_lsp.core.results import CheckStatus
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.measure.local_measurer import FAR_RESERVE_SECONDS, LocalMeasurer, MeasureOptions
from mtmc_lsp.process import gpu_lock
from mtmc_lsp.process.messages import ReleaseRequest, StartAnswer, StartRequest
from mtmc_lsp.process.protocol import GpuLock
from mtmc_lsp.process.sandbox import Isolation
from mtmc_lsp.process.worker import gpu_memory, main
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.timing.worker import timing_commands
from mtmc_lsp.verify.int32_overflow import OTHERS_FILL
from mtmc_lsp.verify.messages import CandidateRequest
from mtmc_lsp.verify.worker import reference_cache, run_target

GIB = 1 << 30
TOTAL = 128 * GIB


class FakeCuda:
    """The allocator of a GPU with 128 GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved = self.allocated = self.emptied = 0
        for name, value in {
            "is_initialized": lambda: True,
            "memory_reserved": lambda: self.reserved,
            "memory_allocated": lambda: self.allocated,
            "mem_get_info": lambda: (TOTAL - self.reserved, TOTAL),
            "empty_cache": self.empty,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def empty(self) -> None:
        self.emptied += 1
        self.reserved = self.allocated


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def respond(monkeypatch: pytest.MonkeyPatch, run: Any) -> str:
    monkeypatch.setattr(main, "_run", lambda command, request: run())
    return main._respond({"command": "some.command", "request": {}}, "token")


@pytest.mark.parametrize(("idle", "emptied"), [(3 * GIB, 0), (5 * GIB, 1)])
def test_a_considerable_share_that_is_idle_goes_back_after_a_command(
    idle: int, emptied: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> dict[str, int]:
        cuda.reserved, cuda.allocated = 40 * GIB + idle, 40 * GIB
        return {}

    assert "result" in respond(monkeypatch, run)
    assert cuda.emptied == emptied


@pytest.mark.parametrize(("total", "idle", "emptied"), [(128, 3, 0), (128, 5, 1), (16, 0.75, 0), (16, 1.25, 1)])
def test_a_process_keeps_a_little_idle_memory_for_its_next_case(
    total: int, idle: float, emptied: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much it holds."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, total * GIB))
    cuda.allocated = 8 * GIB
    cuda.reserved = cuda.allocated + int(idle * GIB)
    run_target.release_gpu_memory()
    assert cuda.emptied == emptied


def test_a_command_that_ran_out_of_memory_keeps_nothing_in_cycles(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def run() -> None:
        tensor, cycle = torch.zeros(4), list[Any]()
        cycle += [cycle, tensor]
        kept.append(weakref.ref(tensor))
        cuda.reserved, cuda.allocated = 2 * GIB, GIB
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert "the GPU is out of memory" in respond(monkeypatch, run)
    assert kept[0]() is None and cuda.emptied == 1


def test_a_lost_context_does_not_hide_the_answer(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda.reserved = 64 * GIB
    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    assert "result" in respond(monkeypatch, dict)


def test_work_that_can_be_left_out_leaves_memory_to_others(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", parts.append)
    cuda.reserved, cuda.allocated = 28 * GIB, 8 * GIB
    with pytest.raises(torch.OutOfMemoryError), gpu_memory.leaving_room():
        raise torch.OutOfMemoryError("CUDA out of memory")
    # Of 120 GiB that it could use, and in addition to what it uses.
    assert parts == [pytest.approx((8 + 0.6 * 120) / 128), 1.0]


class FakeProcess:
    """Runs out of memory until others have released some."""

    def __init__(self, events: list[str], name: str, failures: int = 0) -> None:
        self.events, self.name, self.failures = events, name, failures
        self.gpu_is_free: list[bool] = []

    def call(self, request: object, seconds: float, lock: GpuLock | None = None, end: float = 0.0) -> Any:
        self.events.append(f"call {self.name}")
        folder = gpu_lock.lock_folder("fake")
        self.gpu_is_free.append(gpu_lock._is_free(folder, "fake"))
        if self.failures:
            self.failures -= 1
            raise OutOfMemory("the GPU is out of memory", kind=FailureKind.GPU_OUT_OF_MEMORY)
        return "answer"

    def release_memory(self, seconds: float) -> None:
        self.events.append(f"release {self.name}")

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


def pool_with(failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerPool, FakeProcess]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool, events = WorkerPool(has_gpu=True), list[str]()
    pool.set_gpu("fake")
    process = pool.add(FakeProcess(events, "a", failures))
    pool.add(FakeProcess(events, "b"))
    pool.share_memory_with(FakeProcess(events, "reference"))
    return pool, process


RELEASED = ["release a", "release b", "release reference"]


@pytest.mark.parametrize("failures", [1, 2])
def test_a_command_without_memory_is_repeated_after_others_released_theirs_and_then_alone(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, process = pool_with(failures, tmp_path, monkeypatch)
    assert pool.call(process, ReleaseRequest(), 5.0) == "answer"
    assert process.events == ["call a", *[*RELEASED, "call a"] * failures]
    assert process.gpu_is_free == [True, True, False][: failures + 1]
    assert gpu_lock._is_free(gpu_lock.lock_folder("fake"), "fake")


def test_a_command_without_memory_is_repeated_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, process = pool_with(4, tmp_path, monkeypatch)
    with pytest.raises(OutOfMemory):
        pool.call(process, ReleaseRequest(), 5.0)
    assert process.events == ["call a", *[*RELEASED, "call a"] * 2]


class BusyProcess(FakeProcess):
    """Computes until it is told to end, as a process that computes expected results."""

    def __init__(self, events: list[str], name: str) -> None:
        super().__init__(events, name)
        self.may_end = threading.Event()

    def call(self, request: object, seconds: float, lock: GpuLock | None = None, end: float = 0.0) -> Any:
        answer = super().call(request, seconds, lock, end)
        assert self.may_end.wait(30)
        self.events.append(f"end {self.name}")
        return answer


def test_a_command_without_memory_is_repeated_after_the_calls_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that computes keeps its memory while it lets a timing pass, and cannot be asked for it."""
    pool, process = pool_with(1, tmp_path, monkeypatch)
    busy = BusyProcess(process.events, "busy")
    with ThreadPoolExecutor(3) as others:
        running = others.submit(pool.call, busy, ReleaseRequest(), 5.0)
        while "call busy" not in process.events:
            time.sleep(0.01)
        repeated = others.submit(pool.call, process, ReleaseRequest(), 5.0)
        while not pool._is_cleared:
            time.sleep(0.01)
        # A call that begins now waits for the repeated one.
        later = others.submit(pool.call, FakeProcess(process.events, "later"), ReleaseRequest(), 5.0)
        assert process.events == ["call busy", "call a"]
        busy.may_end.set()
        assert [each.result(30) for each in (running, repeated, later)] == ["answer"] * 3
    assert process.events == ["call busy", "call a", "end busy", *RELEASED, "call a", "call later"]


def test_calls_that_wait_end_with_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And start no process after that."""
    pool, process = pool_with(1, tmp_path, monkeypatch)
    busy = BusyProcess(process.events, "busy")
    with ThreadPoolExecutor(2) as others:
        running = others.submit(pool.call, busy, ReleaseRequest(), 5.0)
        while "call busy" not in process.events:
            time.sleep(0.01)
        repeated = others.submit(pool.call, process, ReleaseRequest(), 5.0)
        while not pool._is_cleared:
            time.sleep(0.01)
        pool.close()
        with pytest.raises(WorkerFailed) as raised:
            repeated.result(30)
        assert raised.value.kind is FailureKind.CANCELLED
        busy.may_end.set()
        running.result(30)
    assert process.events == ["call busy", "call a", "end busy"]
    assert not pool._is_cleared


def test_a_wait_for_the_calls_that_run_ends_with_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool, events = WorkerPool(has_gpu=True, deadline=time.monotonic() + 0.5), list[str]()
    pool.set_gpu("fake")
    busy = BusyProcess(events, "busy")
    with ThreadPoolExecutor(1) as others:
        running = others.submit(pool.call, busy, ReleaseRequest(), 5.0)
        while not events:
            time.sleep(0.01)
        with pytest.raises(WorkerFailed) as raised:
            pool.call_with_room(FakeProcess(events, "a"), ReleaseRequest(), 5.0)
        assert raised.value.kind is FailureKind.DEADLINE
        busy.may_end.set()
        running.result(30)


def test_a_caller_that_holds_the_gpu_does_not_wait_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, process = pool_with(1, tmp_path, monkeypatch)
    with pool.exclusive_gpu():
        assert pool.call_unlocked(process, ReleaseRequest(), 5.0) == "answer"


def test_other_runs_go_on_while_one_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, process = pool_with(0, tmp_path, monkeypatch)
    with gpu_lock.filling("fake") as is_held:
        assert is_held
        assert pool.call(process, ReleaseRequest(), 5.0) == "answer"
        with pool.exclusive_gpu():
            assert pool.call_unlocked(process, ReleaseRequest(), 5.0) == "answer"


@pytest.mark.parametrize("call", ["call", "call_locking"])
def test_a_command_without_memory_is_repeated_after_the_run_that_fills_it(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What this run can free comes first, unless the process locks the GPU itself.
    failures = 2 if call == "call" else 1
    before = ["call a", *[*RELEASED, "call a"] * (failures - 1)]
    pool, process = pool_with(failures, tmp_path, monkeypatch)
    with ThreadPoolExecutor(1) as other:
        with gpu_lock.filling("fake"):
            answer = other.submit(getattr(pool, call), process, ReleaseRequest(), 5.0)
            while len(process.events) < len(before):
                time.sleep(0.01)
            with pytest.raises(TimeoutError):
                answer.result(0.3)
            assert process.events == before
        assert answer.result(30) == "answer"
    assert process.events == [*before, *RELEASED, "call a"]


def test_a_run_that_fills_the_memory_does_not_wait_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, process = pool_with(2, tmp_path, monkeypatch)
    with pool.filling_gpu() as is_held:
        assert is_held
        assert pool.call(process, ReleaseRequest(), 5.0) == "answer"
    assert process.gpu_is_free == [True, True, False]
    # The next run has its turn.
    with gpu_lock.filling("fake", end=time.monotonic()) as is_held:
        assert is_held


def test_a_run_waits_for_the_memory_until_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool = WorkerPool(has_gpu=True, deadline=time.monotonic() + 0.2)
    pool.set_gpu("fake")
    with gpu_lock.filling("fake"), pool.filling_gpu() as is_held:
        assert not is_held


def test_a_check_of_large_tensors_gives_up_in_time_if_another_run_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capture_of: Any
) -> None:
    capture = capture_of(RMS)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    requests: list[Any] = []

    def call(worker: Worker, request: Any, *_: object) -> Any:
        requests.append(request)
        return StartAnswer(Isolation(), "fake", 1 << 40, "")

    monkeypatch.setattr(Worker, "call", call)
    gpu = Environment("3.12", "2.11.0", "3.6.0", "NVIDIA A10", "sm_86", "550.1")
    on_gpu = replace(capture, environment=gpu, workload=replace(capture.workload, device="cuda"))
    options = MeasureOptions(deadline=time.monotonic() + FAR_RESERVE_SECONDS)
    with gpu_lock.filling("fake"), contextlib.closing(LocalMeasurer(on_gpu, sys.executable, options)) as measurer:
        check = measurer.verify_int32_offsets(RMS.candidate())
    assert (check.status, check.detail) == (CheckStatus.SKIPPED, OTHERS_FILL)
    assert not any(isinstance(request, CandidateRequest) for request in requests)


def test_only_an_idle_child_that_runs_is_asked_for_memory(tmp_path: Path) -> None:
    with Worker(sys.executable, cwd=str(tmp_path)) as worker:
        worker.release_memory(20.0)
        assert worker._process is None
        worker.call(StartRequest(gpu=False), 60.0)
        child = worker._process
        worker.release_memory(20.0)
        assert worker._process is child and child is not None and child.poll() is None
        # It runs a command that may wait for the GPU.
        with worker._lock:
            began = time.monotonic()
            worker.release_memory(600.0)
            assert time.monotonic() - began < 60.0
        worker.call(StartRequest(gpu=False), 60.0)


class TestCache:
    """The cache of expected results, with tensors of the host that count as the GPU's."""

    @pytest.fixture(autouse=True)
    def empty(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reference_cache, "_cache", {})
        monkeypatch.setattr(reference_cache, "_device", lambda tensor: "cuda")
        monkeypatch.setattr(reference_cache, "GPU_PART", 1000 / TOTAL)

    @staticmethod
    def stored(count: int, path: str = "case") -> dict[str, Any]:
        value = {"results": [torch.arange(count).reshape(2, -1).t()], "facts": [{}], "oracle": (torch.ones(1), "text")}
        reference_cache.store(path, value, or_file=False)
        return value

    def test_small_values_stay_on_the_gpu(self) -> None:
        value = self.stored(10)
        assert reference_cache.load("case", "cpu") is value

    def test_large_values_are_on_the_host(self) -> None:
        value = self.stored(1000)
        assert set(reference_cache._bytes["case"]) == {reference_cache.MOVED}
        assert isinstance(reference_cache._cache["case"]["results"][0], reference_cache._Moved)
        loaded = reference_cache.load("case", "cpu")
        assert torch.equal(loaded["results"][0], value["results"][0])
        assert loaded["results"][0].stride() == value["results"][0].stride()
        assert loaded["oracle"][1] == "text" and loaded["facts"] == [{}]

    def test_all_values_leave_the_gpu_when_others_need_it(self) -> None:
        value = self.stored(10)
        gpu_memory.release(ReleaseRequest())
        assert isinstance(reference_cache._cache["case"]["results"][0], reference_cache._Moved)
        assert torch.equal(reference_cache.load("case", "cpu")["results"][0], value["results"][0])

    def test_values_without_room_anywhere_are_computed_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reference_cache, "MOVED_BYTES", 100)
        self.stored(1000)
        self.stored(100, "small")
        gpu_memory.release(ReleaseRequest())
        assert not reference_cache.is_cached("case") and not reference_cache.is_cached("small")

    def test_a_layout_that_a_copy_would_change_is_computed_again(self) -> None:
        value = {"results": [torch.zeros(1, 1000).expand(4, 1000)]}
        reference_cache.store("case", value, or_file=False)
        assert not reference_cache.is_cached("case")


@pytest.mark.parametrize(
    ("kept", "left"), [({}, {"clock"}), ({"compiled": {}}, {"clock", "compiled", "inputs", "module"})]
)
def test_an_idle_timing_process_drops_what_it_can_create_again(
    kept: dict[str, Any], left: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"clock": SimpleNamespace(), "inputs": {}, "module": object(), "prepared": {}, **kept}
    monkeypatch.setattr(timing_commands, "_state", state)
    gpu_memory.release(ReleaseRequest())
    assert set(state) == left
