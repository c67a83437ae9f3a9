"""Kernels are compiled with all configurations before a call runs, without launching anything."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from mtmc_lsp.kernels.worker.autotuners import LONG_MS, REPEAT_MS, WARMUP_MS, first_configs, short_benchmarks
from mtmc_lsp.kernels.worker.time_command import recording_launches
from mtmc_lsp.process.worker import kernel_compilation
from mtmc_lsp.process.worker.kernel_compilation import compile_ahead, compiling_unshared, passing_at_launches
from tests.codegen.noted_launches import note_launches


def double_kernel(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, 2 * BLOCK)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of each compilation."""
    calls: list[dict[str, Any]] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(kwargs)
        if kwargs.get("BLOCK") == 64:
            raise ValueError("out of shared memory")

    monkeypatch.setattr(JITFunction, "run", run)
    return calls


def tuner() -> Any:
    configs = [triton.Config({"BLOCK": size}, num_warps=4) for size in (32, 64, 128)]
    return Autotuner(JITFunction(double_kernel), ["x_ptr", "BLOCK"], configs, [], None, None)


def test_every_configuration_is_compiled_and_none_is_launched(compiled: list[dict[str, Any]]) -> None:
    kernel = tuner()

    def call() -> None:
        kernel.run(3, grid=(1,), warmup=False)
        raise ValueError("the results are missing")

    compile_ahead(call)
    # A kernel with an error does not stop the compilation of the others.
    assert [(kwargs["BLOCK"], kwargs["warmup"]) for kwargs in compiled] == [(32, True), (64, True), (128, True)]


def test_a_kernel_that_does_not_compile_in_a_thread_does_not_stop_later_compilations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = pytest.importorskip("triton.runtime._async_compile")

    def fails() -> None:
        raise ValueError("out of shared memory")

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        # As Triton compiles in this mode; later versions get a fourth argument.
        further = [lambda *_: None] * (modes.AsyncCompileMode.submit.__code__.co_argcount - 3)
        modes.active_mode.get().submit(kwargs["BLOCK"], fails, *further)

    monkeypatch.setattr(JITFunction, "run", run)
    for _ in range(2):
        compile_ahead(lambda: JITFunction(double_kernel)[(2,)](3, BLOCK=16))
        assert modes.active_mode.get() is None


def test_only_the_chosen_configurations_are_compiled(compiled: list[dict[str, Any]]) -> None:
    kernel = tuner()
    compile_ahead(lambda: kernel.run(3, grid=(1,), warmup=False), [0, 2])
    assert [kwargs["BLOCK"] for kwargs in compiled] == [32, 128]


def test_a_kernel_without_an_autotuner_is_compiled_as_it_is_launched(compiled: list[dict[str, Any]]) -> None:
    kernel = JITFunction(double_kernel)
    compile_ahead(lambda: kernel[(2,)](3, BLOCK=16))
    assert [(kwargs["BLOCK"], kwargs["grid"], kwargs["warmup"]) for kwargs in compiled] == [(16, (2,), True)]


def test_autotuners_measure_for_a_shorter_time_unless_the_author_says_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import testing

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(testing, "do_bench", lambda call, **options: asked.append(options))
    with short_benchmarks():
        testing.do_bench(lambda: None, quantiles=(0.5,))
        testing.do_bench(lambda: None, warmup=1, rep=300)
    testing.do_bench(lambda: None)
    assert asked == [{"warmup": WARMUP_MS, "rep": REPEAT_MS, "quantiles": (0.5,)}, {"warmup": 1, "rep": 300}, {}]


def test_a_program_lets_others_time_before_each_launch(
    compiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []
    monkeypatch.setattr(kernel_compilation, "let_timings_pass", lambda: passed.append(len(compiled)))
    kernel = JITFunction(double_kernel)
    with passing_at_launches():
        kernel.run(3, BLOCK=16, grid=(1,), warmup=False)
        kernel.run(3, BLOCK=32, grid=(1,), warmup=False)
    kernel.run(3, BLOCK=16, grid=(1,), warmup=False)
    assert passed == [0, 1]
    assert [kwargs["BLOCK"] for kwargs in compiled] == [16, 32, 16]


def test_a_configuration_with_a_long_call_is_measured_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import testing

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(testing, "do_bench", lambda call, **options: asked.append(options))
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        time.sleep((LONG_MS + 5.0) / 1e3)

    with short_benchmarks():
        low, high = testing.do_bench(call, quantiles=(0.2, 0.8))
        one = testing.do_bench(call)
    assert not asked and len(calls) == 4
    assert low == high > LONG_MS and one > LONG_MS


def test_a_program_may_run_the_first_configuration_that_is_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfResources(Exception):
        pass

    ran: list[int] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        ran.append(kwargs["BLOCK"])
        if kwargs["BLOCK"] == 32:
            raise OutOfResources

    monkeypatch.setattr(JITFunction, "run", run)
    kernel = tuner()
    with first_configs():
        kernel.run(3, grid=(1,), warmup=False)
    assert ran == [32, 64] and len(kernel.configs) == 3
    kernel.configs = kernel.configs[:1]
    with first_configs(), pytest.raises(OutOfResources):
        kernel.run(3, grid=(1,), warmup=False)


def test_a_repeated_launch_of_an_autotuner_measures_nothing_while_it_is_compiled(
    compiled: list[dict[str, Any]],
) -> None:
    kernel, launches = tuner(), list[Any]()
    kernel.configs = kernel.configs[:1]
    with recording_launches(launches):
        kernel.run(3, grid=(1,), warmup=False)
    kernel.configs = tuner().configs
    compiled.clear()
    compile_ahead(lambda: [launch() for launch in launches])
    assert [kwargs["warmup"] for kwargs in compiled] == [True, True, True]
    assert not kernel.cache, "no configuration was chosen by launches that did not run"


def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_launchers_are_built_with_the_kernels_while_others_use_the_gpu(
    is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, shared, built = note_launches(monkeypatch), [True], list[tuple[bool, str]]()
    launcher = driver.active.launcher_cls

    def build(source: Any, metadata: Any) -> Any:
        built.append((shared[0], str(source.signature)))
        return launcher(source, metadata)

    @contextlib.contextmanager
    def unshared() -> Iterator[None]:
        shared[0] = False
        yield
        shared[0] = True

    monkeypatch.setattr(driver.active, "launcher_cls", build)
    monkeypatch.setattr(kernel_compilation, "unshared", unshared)
    kernel = triton.jit(copy_kernel)
    x, y = torch.ones(64), torch.ones(64, dtype=torch.float16)

    def call() -> None:
        for tensor in (x, y):
            for block in (16, 32):
                kernel[(1,)](tensor, torch.empty_like(tensor), 50, BLOCK=block)

    if is_ahead:
        compile_ahead(call)
        assert not launches
        assert [is_shared for is_shared, _ in built] == [False, False]
        assert len({signature for _, signature in built}) == 2
    else:
        with compiling_unshared():
            call()
        # Each kernel asks for its launcher again when it is launched, which finds it in the cache.
        assert [is_shared for is_shared, _ in built] == [False, True] * 4
