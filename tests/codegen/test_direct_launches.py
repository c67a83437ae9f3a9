"""Generated launchers launch compiled kernels directly, exactly where Triton would launch the same compiled kernel."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.codegen.module.direct_launches import DIRECT_LAUNCHES
from mtmc_lsp.verify.worker.run_target import LaunchCount
from tests.codegen.launch_values import similar_launches
from tests.codegen.noted_launches import TARGET, Launches, note_launches
from tests.golden.pairs import FOLDER

TEXT = f"""
import torch
import triton
import triton.language as tl

OFFSET = tl.constexpr(3)


@triton.jit
def kernel(x_ptr, out_ptr, n, scale, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0.0) * scale, mask=at < n)


@triton.jit
def with_global(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + OFFSET, n)


@triton.autotune([triton.Config({{"BLOCK": 32}})], key=["n"])
@triton.jit
def tuned(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), n)


{DIRECT_LAUNCHES}
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    path = tmp_path / "kernels.py"
    path.write_text(TEXT)
    return load_user_module(str(path), TEXT, f"direct_{tmp_path.name.replace('-', '_')}")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return note_launches(monkeypatch)


def launch(kernel: Any, *, x: Any = None, n: Any = 50, scale: Any = 2.0, **constants: Any) -> None:
    x = torch.ones(64) if x is None else x
    kernel[(n // 32 + 1 if type(n) is int else 1,)](
        x, torch.empty(64), n, scale, **{"BLOCK": 32, "EVEN": False, "num_warps": 2} | constants
    )


def test_a_repeated_launch_passes_the_same_to_the_driver_without_a_search(
    module: ModuleType, launches: Launches
) -> None:
    x, out = torch.ones(64), torch.empty(64)
    for kernel in (module.kernel, direct := module._DirectLaunches(module.kernel), direct):
        kernel[(2,)](x, out, 50, 2.0, BLOCK=32, EVEN=False, num_warps=2, num_stages=3)
    grid, stream, *_, arguments = launches[0]
    assert grid == (2, 1, 1) and stream == 7 and arguments[0] is x
    assert launches[1] == launches[0] and launches.searches == 2
    assert launches[2][:4] == launches[0][:4]
    assert launches[2][4] == [x.data_ptr(), out.data_ptr(), *arguments[2:]], "the driver does not check numbers"


DIFFERENCES: dict[str, dict[str, Any]] = {
    "another dtype": {"x": torch.ones(64, dtype=torch.float16)},
    "an address that is no multiple of 16": {"x": torch.ones(65)[1:]},
    "a size of 1": {"n": 1},
    "a multiple of 16": {"n": 48},
    "a size beyond 32 bits": {"n": 2**31 + 1},
    "a number of another type": {"scale": 2},
    "another constant": {"BLOCK": 64},
    "another option": {"num_warps": 4},
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_what_triton_specialises_on_is_searched_again(module: ModuleType, launches: Launches, difference: str) -> None:
    direct = module._DirectLaunches(module.kernel)
    for _ in range(2):
        launch(direct)
    assert launches.searches == 1
    launch(direct, **DIFFERENCES[difference])
    assert launches.searches == 2
    launch(module.kernel, **DIFFERENCES[difference])
    assert [item[2:4] for item in launches[2:3]] == [item[2:4] for item in launches[3:]], "Triton's version ran"


def test_sizes_that_triton_does_not_tell_apart_share_a_version(module: ModuleType, launches: Launches) -> None:
    direct = module._DirectLaunches(module.kernel)
    for n in (50, 49, 2, 2**31 - 1, 51):
        launch(direct, n=n)
    for n in (32, 0, 64, 2**31 - 16):
        launch(direct, n=n)
    assert launches.searches == 2


def test_negative_and_long_integers_do_not_keep_one_version_each(module: ModuleType, launches: Launches) -> None:
    direct = module._DirectLaunches(module.kernel)
    for n in range(100):
        for sign in (-1, 1):
            direct[(1,)](torch.ones(64), torch.ones(64), sign * (n + 2), 2.0, BLOCK=32, EVEN=False)
            direct[(1,)](torch.ones(64), torch.ones(64), sign * (2**40 + n), 2.0, BLOCK=32, EVEN=False)
    assert sum(len(versions) for _, versions in direct.forms.values()) <= 8


def test_constants_that_are_equal_in_python_alone_have_their_versions(module: ModuleType, launches: Launches) -> None:
    direct = module._DirectLaunches(module.kernel)
    for even in (True, 1, False, 0, 0.0, -0.0):
        launch(direct, EVEN=even)
    assert launches.searches == 6


def test_constants_by_position_have_their_versions(module: ModuleType, launches: Launches) -> None:
    direct = module._DirectLaunches(module.kernel)
    for block in (32, 64, 32):
        direct[(1,)](torch.ones(64), torch.ones(64), 50, 2.0, block, EVEN=True)
    assert [arguments[4] for *_, arguments in launches] == [32, 64, 32]
    assert launches.searches == 2


def test_each_device_has_its_version(module: ModuleType, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = module._DirectLaunches(module.kernel)
    for device in (0, 0, 1, 0, 1):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor, device=device: device)
        launch(direct)
    assert launches.searches == 2


def test_settings_of_triton_are_respected(
    module: ModuleType, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that was compiled under other settings is not kept either."""
    direct = module._DirectLaunches(module.kernel)
    launch(direct)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.debug = True
        launch(direct)
        launch(direct, n=64)
    launch(direct, n=64)
    assert launches.searches == 4
    hooked = []
    module.kernel.add_pre_run_hook(lambda *_, **__: hooked.append(1))
    launch(direct)
    assert hooked == [1], "hooks of the kernel run"
    assert launches.searches == 5


def test_hooks_of_profilers_see_all_launches(module: ModuleType, launches: Launches) -> None:
    direct = module._DirectLaunches(module.kernel)
    launch(direct)
    seen: list[str] = []
    hooks = triton.knobs.runtime.launch_enter_hook

    def note(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    hooks.add(note)
    try:
        launch(direct)
    finally:
        hooks.remove(note)
    assert seen == ["kernel"] and launches.searches == 2
    launch(direct)
    assert launches.searches == 2


@pytest.mark.parametrize("name", ["with_global", "tuned"])
def test_kernels_that_read_global_variables_or_are_tuned_are_left_to_triton(
    module: ModuleType, launches: Launches, name: str
) -> None:
    """Generated code has none of them."""
    direct = module._DirectLaunches(getattr(module, name))
    constants = {} if name == "tuned" else {"BLOCK": 32}
    for _ in range(3):
        direct[(1,)](torch.ones(64), 50, **constants)
    assert launches.searches == 3 and len(launches) == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((50, 2.0, 32), {}),
        ((50, 2.0, 32, True, 7), {}),
        ((50, 2.0, 32, True), {"n": 50}),
        ((50, 2.0), {"BLOCK": 32, "EVEN": torch.ones(1)}),
        ((50, 2.0), {"BLOCK": 32, "EVEN": [1]}),
        ((50, "2.0"), {"BLOCK": 32, "EVEN": True}),
        ((50, torch.float32), {"BLOCK": 32, "EVEN": True}),
    ],
)
def test_launches_that_triton_refuses_or_compares_otherwise_are_left_to_it(
    module: ModuleType, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    direct = module._DirectLaunches(module.kernel)
    assert direct.form_of((torch.ones(64), torch.ones(64), *arguments), named) is None


def test_grids_may_be_functions_and_amd_gpus_are_left_to_triton(
    module: ModuleType, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = module._DirectLaunches(module.kernel)
    for _ in range(2):
        direct[lambda values: (values["BLOCK"],)](torch.ones(64), torch.ones(64), 50, 2.0, BLOCK=32, EVEN=True)
    assert launches.searches == 1 and launches[-1][0] == (32, 1, 1)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    direct = module._DirectLaunches(module.kernel)
    for _ in range(2):
        launch(direct)
    assert launches.searches == 3


def test_arguments_by_keyword_have_their_versions(module: ModuleType, launches: Launches) -> None:
    direct = module._DirectLaunches(module.kernel)
    for n in (50, 51):
        direct[(1,)](torch.ones(64), torch.ones(64), scale=2.0, n=n, BLOCK=32, EVEN=True)
        direct[(1,)](x_ptr=torch.ones(64), out_ptr=torch.ones(64), scale=2.0, n=n, BLOCK=32, EVEN=True)
    assert launches.searches == 2 and len(launches) == 4


def test_names_that_are_no_identifiers_are_never_evaluated(module: ModuleType, launches: Launches) -> None:
    direct = module._DirectLaunches(module.kernel)
    given = (torch.ones(64), torch.ones(64), 50, 2.0)
    name = "num_warps, __import__('os')"
    assert direct.form_of(given, {"BLOCK": 32, "EVEN": True}) is not None
    assert direct.form_of(given, {"BLOCK": 32, "EVEN": True, name: 4}) is None


FURTHER = {"EVEN": st.sampled_from([False, True, 0, 1, 0.0, -0.0, 1.0])}


@given(similar_launches(FURTHER))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_direct_launch_is_never_of_another_version_than_tritons(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]
) -> None:
    kernel = module.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))

    def version(*arguments: Any, **named: Any) -> str:
        _, specialization, options = bind(*arguments, **named)
        return compute_cache_key({}, specialization, options)

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        compiled = object.__new__(CompiledKernel)
        compiled.module = compiled.function = compiled.packed_metadata = None
        compiled.version = version(*arguments, **named)
        compiled._run = lambda *_: launched.append(compiled)
        return compiled

    launched: list[Any] = []
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: 0))
    direct = module._DirectLaunches(kernel)
    memory = torch.zeros(1024, dtype=torch.uint8)
    for call in calls * 2:
        x, out = (
            memory[offset : offset + 512].view(dtype)
            for dtype, offset in zip(call["dtypes"], call["offsets"], strict=True)
        )
        arguments = (x, out, call["n"], call["scale"])
        named = {name: call[name] for name in ("BLOCK", "EVEN", "num_warps")}
        direct[(1,)](*arguments, **named)
        while launched:
            assert launched.pop().version == version(*arguments, **named)


def test_no_generated_kernel_depends_on_values_that_triton_compares_in_each_launch() -> None:
    kernels = 0
    for path in sorted(FOLDER.glob("*/after.py")):
        names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        module = load_user_module(str(path), path.read_text(), f"golden_{path.parent.name.replace('-', '_')}")
        for kernel in (getattr(module, name) for name in names):
            if isinstance(kernel, JITFunction):
                assert kernel.cache_key and not kernel.used_global_vals, path
                kernels += 1
    assert kernels > 20


def test_the_verification_counts_and_disables_direct_launches(module: ModuleType, launches: Launches) -> None:
    direct = module._DirectLaunches(module.kernel)
    count = LaunchCount()
    with count.counting():
        launch(direct)
        launch(direct)
        launch(module.kernel)
    assert count.count == 3 and launches.searches == 2
    with LaunchCount().counting(executes=False):
        launch(direct)
        launch(direct, n=64)
    assert len(launches) == 3
    launch(direct, n=64)
    assert len(launches) == 4, "a launch that did nothing leaves no version behind"


@pytest.mark.parametrize("kernel", ["direct", "plain"])
def test_torch_compile_traces_the_kernel(
    module: ModuleType, launches: Launches, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """In launchers that cannot be an operator, the compiler traces into the helper."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    chosen = {"direct": module._DirectLaunches(module.kernel), "plain": module.kernel}[kernel]
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return lambda *inputs: (torch.ones(64),)

    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        chosen[(2,)](x, out, 50, 2.0, BLOCK=32, EVEN=False, num_warps=2)
        return out

    torch.compile(function, backend=backend, fullgraph=True)(torch.ones(64))
    (graph,) = graphs
    assert "triton_kernel_wrapper_mutation" in [str(node.target) for node in graph.graph.nodes]
    assert launches.searches == 0
