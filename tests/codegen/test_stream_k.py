"""Stream-K matmuls equal the user's code for all sizes and numbers of programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker
from tests.codegen.harness import compile_errors, fused, verified
from tests.codegen.test_kernels import LINEAR

SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 4, "warps": 4, "stages": 2}
BATCHED = """import torch
# mtmc: a=f32[B,M,K] b=f32[B,K,N] B=2 M=36 K=70 N=24
def f(a, b):
    return torch.relu(a @ b) + 1.0
"""
HALF = """import torch
import torch.nn.functional as F
# mtmc: x=f16[40,72] w=f16[56,72] b=f16[56] r=f16[40,56]
def f(x, w, b, r):
    return F.silu(F.linear(x, w, b)) + r
"""
COMPUTED = """import torch
# mtmc: a=f32[M,K]@1..2 b=f32[K,N] M=34 K=70 N=36
def f(a, b):
    return torch.reciprocal(a * 1000 + 0.001) @ b + 1.0
"""
CONVOLUTION = """import torch
import torch.nn.functional as F
# mtmc: x=f32[B,16,H,W] w=f32[20,16,3,3] B=2 H=5 W=7
def f(x, w):
    return torch.relu(F.conv2d(x, w, padding=1))
"""
IN_PLACE = """import torch
# mtmc: x=f32[M,N] a=f32[M,K] b=f32[K,N] M=36 N=40 K=50
def f(x, a, b):
    x.mul_(0.5).add_(a @ b)
    return x
"""
TWO = """import torch
# mtmc: a=f32[M,K] b=f32[K,N] M=36 N=40 K=50
def f(a, b):
    y = a @ b
    return y, torch.relu(y)
"""
DOUBLE = TWO.replace("f32", "f64")
CASES: dict[str, tuple[str, dict[str, int | str | bool]]] = {
    "fewer programs than tiles": (LINEAR, {"precision": "ieee", "stream_k": 4}),
    "as many programs as tiles": (LINEAR, {"precision": "ieee", "stream_k": 6}),
    "more programs than tiles": (LINEAR, {"precision": "ieee", "stream_k": 7}),
    "more programs than blocks of K": (LINEAR, {"precision": "ieee", "stream_k": 31}),
    "one program": (LINEAR, {"precision": "ieee", "stream_k": 1}),
    "in tf32": (LINEAR, {"precision": "tf32", "stream_k": 4}),
    "by split operands": (LINEAR, {"precision": "fp16x3", "stream_k": 4}),
    "by split operands, in short pieces": (LINEAR.replace("K=40", "K=300"), {"precision": "fp16x3-short", "stream_k": 5}),
    "by split operands, tiles moved by hardware": (LINEAR, {"precision": "fp16x3", "tma": True, "stream_k": 4}),
    "a batch": (BATCHED, {"precision": "ieee", "stream_k": 5}),
    "a batch by split operands": (BATCHED, {"precision": "fp16x3", "tma": True, "stream_k": 5}),
    "both operands split as they are read": (LINEAR, {"precision": "fp16x3-promoted", "split_on_load": "both", "stream_k": 4}),
    "what is computed split before it is summed": (COMPUTED, {"precision": "fp16x3-promoted", "split_on_load": "both", "stream_k": 5}),
    "in half precision": (HALF, {"precision": "native", "stream_k": 5}),
    "in half precision, tiles moved by hardware": (HALF, {"precision": "native", "tma": True, "stream_k": 5}),
    "windows": (CONVOLUTION, {"precision": "ieee", "stream_k": 4}),
    "windows, a place after the other": (CONVOLUTION, {"precision": "ieee", "kernel_positions": True, "stream_k": 4}),
    "into an input": (IN_PLACE, {"precision": "ieee", "stream_k": 4}),
    "two results": (TWO, {"precision": "ieee", "stream_k": 4}),
    "double precision": (DOUBLE, {"precision": "ieee", "stream_k": 4}),
    "tiles that the second kernel does in pieces": (
        LINEAR.replace("N=24", "N=130"), {"precision": "ieee", "block_m": 64, "block_n": 128, "stream_k": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_stream_k_matmul_equals_the_users_code(name: str, captured) -> None:
    text, config = CASES[name]
    capture = captured(text, "f")
    candidate = fused(capture, text, {**SMALL, **config})
    assert [launch.kernel for launch in candidate.launches][-2:] == ["f_kernel_runs", "f_kernel"]
    assert "atomic" not in candidate.source
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


COMPILED = ("by split operands, tiles moved by hardware", "in half precision, tiles moved by hardware", "a batch",
            "windows, a place after the other", "both operands split as they are read")  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_the_kernels_compile_for_hopper(name: str, captured) -> None:
    text, config = CASES[name]
    capture = captured(text, "f")
    wide = {"block_m": 64, "block_n": 64, "block_k": 32}
    assert not compile_errors(capture, fused(capture, text, {**SMALL, **wide, **config}), ("sm_90",))


RESULTS = ["a @ b", "torch.tanh(a @ b + c) * 2.0", "F.gelu(torch.sin(a) @ b) + r", "(a @ b).sigmoid() * r - c"]
FORMS: dict[str, list[dict[str, int | str | bool]]] = {
    "f32": [{"precision": "ieee"}, {"precision": "fp16x3"}, {"precision": "fp16x3", "tma": True}],
    "f16": [{"precision": "native"}, {"precision": "native", "tma": True}],
    "f64": [{"precision": "ieee"}],
}


@st.composite
def products(draw: st.DrawFn) -> tuple[str, dict[str, int | str | bool], list[dict[str, int]]]:
    """Target source, kernel configuration and sizes."""
    dtype = draw(st.sampled_from(sorted(FORMS)))
    side = st.sampled_from((16, 32))
    config = {
        **SMALL,
        "block_m": draw(side),
        "block_n": draw(side),
        "block_k": draw(side),
        "group_m": draw(st.sampled_from((1, 2, 8))),
        **draw(st.sampled_from(FORMS[dtype])),
        "stream_k": draw(st.integers(1, 14)),
    }
    sizes = st.fixed_dictionaries({name: st.integers(33, 64) for name in "MN"} | {"K": st.integers(1, 80)})
    calls = draw(st.lists(sizes, min_size=2, max_size=2))
    named = " ".join(f"{name}={size}" for name, size in calls[0].items())
    text = (
        f"import torch\nimport torch.nn.functional as F\n# mtmc: a=X[M,K] b=X[K,N] c=X[N] r=X[M,N] {named}\n".replace(
            "X", dtype
        )
        + f"def f(a, b, c, r):\n    return {draw(st.sampled_from(RESULTS))}\n"
    )
    return text, config, calls


# Each case has its own capture; the cases are already small.
SLOWLY = settings(
    deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


@settings(SLOWLY, max_examples=20)
@given(case=products())
def test_all_sizes_and_numbers_of_programs_equal_the_users_code(checker: Checker, case) -> None:
    text, config, calls = case
    capture = checker.capture(text)
    candidate = fused(capture, text, config)
    for number, sizes in enumerate(calls):
        wrong = checker.failures(capture, [candidate], Case(sizes, "normal", number))[0]
        # Sizes that descriptors do not support run the original code.
        assert wrong in ("",) or (number and wrong == "no kernel was launched"), f"{wrong} {sizes}\n{candidate.source}"


WRONG = {
    "the last part is left out": ("tl.cdiv((shared + 1) * steps, run))", "tl.cdiv((shared + 1) * steps, run) - 1)"),
    "the first part is left out": ("range(shared * steps // run,", "range(shared * steps // run + 1,"),
    "a run ends a block too early": ("last = min(first + run,", "last = min(first + run - 1,"),
    "the last wave has no runs": ("waves + tl.cdiv(last, steps) - first // steps)", "waves)"),
    "tiles of whole waves are left out": ("range(0, waves +", "range(waves, waves +"),
    "parts in each other's place": ("(program + shared) * (BLOCK_M", "program * (BLOCK_M"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_distribution_is_detected(name: str, captured) -> None:
    old, new = WRONG[name]
    text = LINEAR.replace("K=40", "K=150")
    capture = captured(text, "f")
    good = fused(capture, text, {**SMALL, "precision": "ieee", "stream_k": 4})
    assert good.source.count(old) == 1
    assert not verified(capture, replace(good, source=good.source.replace(old, new))).is_correct
