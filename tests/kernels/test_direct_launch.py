"""A decorator launches compiled kernels directly, exactly where Triton would launch the same compiled kernel."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.kernels.actions.launch.helper import NAME
from mtmc_lsp.kernels.worker.autotuners import autotuners, direct_launches, only_config
from mtmc_lsp.kernels.worker.time_command import recording_launches
from tests.codegen.launch_values import similar_launches
from tests.codegen.noted_launches import TARGET, Launches, note_launches
from tests.kernels.observing import HEADER, Observing
from tests.kernels.proposing import applied, proposed

SCALE = (
    HEADER
    + """\
# one block of a vector
@triton.jit
def scale_kernel(x_ptr, out_ptr, n, scale, BLOCK: tl.constexpr, SHIFT: tl.constexpr = 0):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x * scale + SHIFT, mask=at < n)


@triton.jit
def other_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 1.0, mask=at < n)


# mtmc: x=f32[N] N=300
def scaled(x):
    out = torch.empty_like(x)
    other_kernel[(triton.cdiv(x.numel(), 64),)](out, x.numel(), BLOCK=64)
    grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)
    scale_kernel[grid](x, out, x.numel(), 2.0, BLOCK=64)
    return out
"""
)


def test_decorators_are_the_only_change_but_for_the_helper() -> None:
    (item,) = proposed(SCALE, "direct-launch")
    assert item.kernel == "scale_kernel, other_kernel"
    text = item.applied(SCALE.encode()).decode()
    assert text.count(f"@{NAME}\n@triton.jit\ndef ") == 2 and text.count(f"class {NAME}:\n") == 1
    assert f"\n\n\nclass {NAME}:\n" in text
    assert text.index(f"class {NAME}") < text.index("# one block of a vector\n")
    assert "\n        return compiled\n\n\n# one block" in text
    assert proposed(text, "direct-launch") == []
    first = applied(SCALE.replace("# one block of a vector\n", ""), "direct-launch")
    assert first.index(f"class {NAME}") < first.index(f"@{NAME}\n@triton.jit\ndef ")
    assert len(set(SCALE.splitlines()) - set(text.splitlines())) == 0


def test_a_further_kernel_shares_the_helper() -> None:
    one = SCALE.replace("    other_kernel[", "    print(other_kernel)\n    other_kernel[")
    text = applied(one, "direct-launch").replace("    print(other_kernel)\n", "")
    again = applied(text, "direct-launch")
    assert again.count(f"class {NAME}:") == 1 and again.count(f"@{NAME}\n@triton.jit\n") == 2


@pytest.mark.parametrize(
    "change",
    [
        ("@triton.jit\ndef scale", "@other\n@triton.jit\ndef scale"),
        ("@triton.jit\ndef scale", '@triton.heuristics({"SHIFT": of_values})\n@triton.jit\ndef scale'),
        ("@triton.jit\ndef scale", '@triton.heuristics({"SHIFT": lambda a: a["x_ptr"].max()})\n@triton.jit\ndef scale'),
        ("    return out", "    print(scale_kernel)\n    return out"),
        ("    return out", "    scale_kernel.warmup\n    return out"),
        (
            "@triton.jit\ndef scale",
            'def of(a):\n    return size(a)\n\n\n@triton.heuristics({"SHIFT": of})\n@triton.jit\ndef scale',
        ),
        (
            "@triton.jit\ndef scale",
            'def of(a):\n    return a["x_ptr"].max()\n\n\n@triton.heuristics({"SHIFT": of})\n@triton.jit\ndef scale',
        ),
        ("    scale_kernel[grid](x, out, x.numel(), 2.0, BLOCK=64)\n", ""),
        ("import triton\n", "import triton as t\n"),
    ],
)
def test_kernels_that_are_used_otherwise_stay(change: tuple[str, str]) -> None:
    changed = SCALE.replace(*change)
    assert changed != SCALE
    assert not any("scale_kernel" in item.kernel for item in proposed(changed, "direct-launch"))


@pytest.mark.parametrize(
    "change",
    [
        ("x, out, x.numel(), 2.0, BLOCK=64", "*(x, out, x.numel(), 2.0), BLOCK=64"),
        ("2.0, BLOCK=64", "2.0, **{'BLOCK': 64}"),
        (
            "@triton.jit\ndef scale",
            'def of(args):\n    return args["n"] % 2\n\n\n@triton.heuristics({"SHIFT": of})\n@triton.jit\ndef scale',
        ),
        ("import torch\n", ""),
        ("import torch\n", "import torch as t\n"),
    ],
)
def test_launches_with_stars_named_heuristics_and_missing_imports_are_covered(change: tuple[str, str]) -> None:
    changed = SCALE.replace(*change)
    assert changed != SCALE
    text = applied(changed, "direct-launch")
    assert f"@{NAME}\n" in text
    assert text.count("import torch\n") == 1


def test_the_interpreter_runs_the_kernels_as_before(observe: Observing) -> None:
    text = applied(SCALE, "direct-launch")
    for trace in observe(text, "scaled", {"N": 300}, {"N": 64}, original=SCALE):
        assert not trace.faults, trace.faults
        assert len(trace.launches) == 2


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    text = applied(SCALE, "direct-launch")
    path = tmp_path / "model.py"
    path.write_text(text)
    return load_user_module(str(path), text, f"launched_{tmp_path.name.replace('-', '_')}")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return note_launches(monkeypatch)


def launch(kernel: Any, *, x: Any = None, n: Any = 50, scale: Any = 2.0, **constants: Any) -> None:
    x = torch.ones(64) if x is None else x
    kernel[(2,)](x, torch.empty(64), n, scale, **{"BLOCK": 32, "num_warps": 2} | constants)


FORMS: list[Any] = [
    lambda kernel, x, out: kernel[(2,)](x, out, 50, 2.0, BLOCK=32, SHIFT=1, num_warps=2),
    lambda kernel, x, out: kernel[(2,)](x, out, 50, 2.0, 32, 1, num_warps=2),
    lambda kernel, x, out: kernel[(2,)](x, out, 50, 2.0, 32, num_warps=2),
    lambda kernel, x, out: kernel[(2, 3)](x, out, n=50, scale=2.0, BLOCK=32),
    lambda kernel, x, out: kernel[(2, 3, 4)](SHIFT=2, BLOCK=32, scale=2.0, n=50, out_ptr=out, x_ptr=x),
    lambda kernel, x, out: kernel[lambda meta: (meta["BLOCK"], meta["SHIFT"] + 1, meta["n"])](
        x, out, 50, 2.0, BLOCK=32
    ),
]


@pytest.mark.parametrize("call", FORMS)
def test_a_repeated_launch_passes_the_same_to_the_driver_without_a_search(
    module: ModuleType,
    launches: Launches,
    call: Any,
) -> None:
    x, out = torch.ones(64), torch.empty(64)
    direct = module.scale_kernel
    for kernel in (direct.fn, direct, direct, direct):
        call(kernel, x, out)
    assert len(launches) == 4 and all(item == launches[0] for item in launches)
    assert launches.searches == 2


DIFFERENCES: dict[str, dict[str, Any]] = {
    "another dtype": {"x": torch.ones(64, dtype=torch.float16)},
    "an address that is no multiple of 16": {"x": torch.ones(65)[1:]},
    "a size of 1": {"n": 1},
    "a multiple of 16": {"n": 48},
    "a size beyond 32 bits": {"n": 2**31 + 1},
    "a number of another type": {"scale": 2},
    "another constant": {"BLOCK": 64},
    "a constant of another type": {"SHIFT": False},
    "another option": {"num_warps": 4},
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_what_triton_specialises_on_is_searched_again(
    module: ModuleType,
    launches: Launches,
    difference: str,
) -> None:
    direct = module.scale_kernel
    for _ in range(2):
        launch(direct, SHIFT=0)
    assert launches.searches == 1
    launch(direct, **{"SHIFT": 0} | DIFFERENCES[difference])
    assert launches.searches == 2
    launch(direct.fn, **{"SHIFT": 0} | DIFFERENCES[difference])
    assert launches[-1][2:4] == launches[-2][2:4], "Triton's version ran"


@pytest.mark.parametrize(("constant", "searches"), [(0.5, 1), (-0.0, 1), (None, 1), ([1], 3), ((True,), 3)])
def test_constants_that_are_no_key_are_left_to_triton(
    constant: Any, searches: int, monkeypatch: pytest.MonkeyPatch, module: ModuleType, launches: Launches
) -> None:
    calls: list[Any] = []
    compiled = object.__new__(CompiledKernel)
    compiled.module, compiled._run, compiled.function, compiled.packed_metadata = None, lambda *_: None, 1, None
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: calls.append(kwargs) or compiled)
    for _ in range(3):
        launch(module.scale_kernel, SHIFT=constant)
    assert len(calls) == searches
    if isinstance(constant, float):
        launch(module.scale_kernel, SHIFT=0.0)
        assert len(calls) == 2, "0.0 and -0.0 are different constants"


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    def get_device(self) -> int:
        return 0


def test_addresses_reach_the_driver_as_numbers_which_it_need_not_check(module: ModuleType, launches: Launches) -> None:
    x = torch.ones(64).as_subclass(OnGpu)
    for _ in range(2):
        launch(module.scale_kernel, x=x)
        module.other_kernel[(2,)](x, 50, 32)
    assert launches.searches == 2
    for searched, direct in zip(launches[:2], launches[2:], strict=True):
        assert searched[4][0] is x and direct[4][0] == x.data_ptr()
        assert searched[:4] == direct[:4] and searched[4][2:] == direct[4][2:]
    launch(module.scale_kernel)
    assert launches.searches == 3 and isinstance(launches[-1][4][0], torch.Tensor), "memory of the host is checked"


def test_tensors_with_another_dtype_than_torch_knows_are_launched_directly(
    module: ModuleType, launches: Launches
) -> None:
    half, brain = triton.language.float16, triton.language.bfloat16
    bits = torch.ones(64, dtype=torch.int16).as_subclass(OnGpu)
    for dtype, searches in ((half, 1), (brain, 2), (half, 2)):
        for _ in range(2):
            launch(module.scale_kernel, x=triton.reinterpret(bits, dtype))
        assert launches.searches == searches
        assert launches[-1][4][0] == bits.data_ptr()
    launch(module.scale_kernel.fn, x=triton.reinterpret(bits, half))
    assert launches.searches == 3
    assert launches[-1][:4] == launches[-2][:4], "Triton's version ran"
    launch(module.scale_kernel, x=triton.reinterpret(torch.ones(65, dtype=torch.int16)[1:], half))
    assert launches.searches == 4, "an unaligned address is left to Triton"


def test_a_global_variable_that_changes_is_left_to_triton(tmp_path: Path, launches: Launches) -> None:
    text = SCALE.replace("@triton.jit\ndef scale", "TWO: tl.constexpr = tl.constexpr(2)\n\n\n@triton.jit\ndef scale")
    text = applied(text.replace("x * scale + SHIFT", "x * scale + SHIFT * TWO"), "direct-launch")
    path = tmp_path / "model.py"
    path.write_text(text)
    module: Any = load_user_module(str(path), text, f"globals_{tmp_path.name.replace('-', '_')}")
    for _ in range(3):
        launch(module.scale_kernel)
    assert module.scale_kernel.kernel.used_global_vals and launches.searches == 1
    module.TWO = triton.language.constexpr(3)
    with pytest.raises(RuntimeError, match="TWO has changed"):
        launch(module.scale_kernel)


def test_hooks_of_launches_are_respected(module: ModuleType, launches: Launches) -> None:
    if not hasattr(triton.knobs.runtime.launch_enter_hook, "add"):
        pytest.skip("this version of Triton keeps one hook, which is a setting")
    for _ in range(2):
        launch(module.scale_kernel)
    seen: list[Any] = []
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        launch(module.scale_kernel)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1
    launch(module.scale_kernel)
    assert (len(seen), launches.searches) == (1, 2)


def test_settings_of_triton_and_hooks_are_respected(module: ModuleType, launches: Launches) -> None:
    direct = module.scale_kernel
    launch(direct)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.debug = True
        launch(direct)
    assert launches.searches == 2
    hooked: list[int] = []
    direct.fn.add_pre_run_hook(lambda *_, **__: hooked.append(1))
    launch(direct)
    assert hooked == [1] and launches.searches == 3


def test_the_launches_of_a_test_are_repeated_directly(module: ModuleType, launches: Launches) -> None:
    noted: list[Any] = []
    helpers = direct_launches(module)
    assert [kind.__name__ for kind in helpers] == [NAME]
    with recording_launches(noted, helpers):
        launch(module.scale_kernel)
        launch(module.scale_kernel.fn)
    assert (len(noted), launches.searches) == (2, 2)
    noted[0]()
    assert (len(launches), launches.searches) == (3, 2)
    assert launches[2][0] == launches[0][0]


TUNED = SCALE.replace(
    "@triton.jit\ndef scale",
    """\
@triton.autotune([triton.Config({"BLOCK": 32}, num_warps=2), triton.Config({"BLOCK": 64})], key=["n"])
@triton.heuristics({"SHIFT": lambda args: args["n"] % 3 + args["x_ptr"].shape[0] % 2})
@triton.jit
def scale""",
).replace("2.0, BLOCK=64)", "2.0)")


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel whose autotuner chooses by the size, and whose constant depends on values."""
    text = applied(TUNED, "direct-launch").encode()
    assert f"@{NAME}\n@triton.autotune(".encode() in text
    path = tmp_path / "model.py"
    path.write_bytes(text)

    def bench(self: Any, *args: Any, config: Any, **kwargs: Any) -> float:
        self.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": True})
        return float(args[2] % 64 == 0) if config.kwargs["BLOCK"] == 64 else 0.5

    monkeypatch.setattr(Autotuner, "_bench", bench)
    return load_user_module(str(path), text.decode(), f"tuned_{tmp_path.name.replace('-', '_')}").scale_kernel


def test_what_an_autotuner_and_heuristics_choose_by_values_is_kept_for_these_values(
    tuned: Any, launches: Launches
) -> None:
    def call(kernel: Any, n: int, rows: int) -> None:
        kernel[lambda meta: (meta["n"] // meta["BLOCK"] + 1, meta["SHIFT"] + 1)](
            torch.ones(rows), torch.ones(64), n, 2.0
        )

    found = []
    for kernel in (tuned.fn, tuned, tuned):
        launches.clear()
        for n, rows in ((64, 4), (65, 4), (66, 4), (128, 4), (64, 5)):
            call(kernel, n, rows)
        found.append([(item[0], item[2], item[3], item[4][2:]) for item in launches])
        searches = launches.searches
        launches.searches = 0
    assert searches == 0
    assert found[0] == found[1] == found[2]
    assert len({item[:3] for item in found[0]}) == 5


def test_configurations_with_hooks_are_left_to_triton(tuned: Any, launches: Launches) -> None:
    tuned.fn.configs[1].pre_hook = lambda args: None
    again = type(tuned)(tuned.fn)
    assert not again.is_direct
    for _ in range(2):
        again[(1,)](torch.ones(4), torch.ones(64), 65, 2.0)
    assert launches.searches > 2 and not again.forms


def test_a_version_that_one_configuration_gave_is_forgotten(tuned: Any, launches: Launches) -> None:
    module = ModuleType("tuned")
    module.kernel, module.helper = tuned, type(tuned)  # type: ignore[attr-defined]
    type(tuned).__module__ = "tuned"
    assert [*autotuners(module)] == ["kernel"]
    with only_config([module], 0):
        tuned[(1,)](torch.ones(4), torch.ones(64), 65, 2.0)
        assert len(tuned.forms) == 1
    assert not tuned.forms


FURTHER = {
    "SHIFT": st.sampled_from([False, True, 0, 1, 0.0, -0.0, 1.0, None, "a", torch.float32]),
    "form": st.integers(0, 2),
}


@given(similar_launches(FURTHER))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_direct_launch_is_never_of_another_version_than_tritons(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]
) -> None:
    kernel = module.scale_kernel.fn
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))

    def version(*arguments: Any, **named: Any) -> tuple[str, list[Any]]:
        bound, specialization, options = bind(*arguments, **named)
        return compute_cache_key({}, specialization, options), list(map(id, bound.values()))

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        compiled = object.__new__(CompiledKernel)
        compiled.module = compiled.function = compiled.packed_metadata = None
        compiled.version = version(*arguments, **named)[0]
        compiled._run = lambda *given: launched.append((compiled, given[9:]))
        return compiled

    launched: list[Any] = []
    monkeypatch.setattr(JITFunction, "run", run)
    gpu = SimpleNamespace(get_current_stream=lambda device: 0, get_current_device=lambda: 0)
    monkeypatch.setattr(driver, "_active", gpu)
    memory = torch.zeros(1024, dtype=torch.uint8)
    for call in calls * 2:
        x, out = (
            memory[offset : offset + 512].view(dtype)
            for dtype, offset in zip(call["dtypes"], call["offsets"], strict=True)
        )
        arguments: tuple[Any, ...] = (x, out, call["n"], call["scale"])
        named = {name: call[name] for name in ("BLOCK", "SHIFT", "num_warps")}
        if call["form"] == 1:
            arguments = (*arguments, named.pop("BLOCK"), named.pop("SHIFT"))
        elif call["form"] == 2:
            named = {"scale": arguments[3], **named}
            arguments = arguments[:3]
        module.scale_kernel[(1,)](*arguments, **named)
        while launched:
            compiled, values = launched.pop()
            assert (compiled.version, list(map(id, values))) == version(*arguments, **named)
