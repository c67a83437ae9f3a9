"""PyTorch operations around a launch go into the kernel, and stay where they are if that could change a result."""

from __future__ import annotations

import pytest

from mtmc_lsp.kernels.optimizer import within_kernels
from tests.kernels.observing import HEADER, Observing
from tests.kernels.proposing import applied, facts, proposed

ADD = (
    HEADER
    + """\
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)  # the sum


# mtmc: x=f32[M,N] y=f32[M,N] M=40 N=300
def add(x, y):
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return torch.relu(out) * 2
"""
)
BEFORE = ADD.replace("    out = torch", "    y = torch.exp(y)  # weights\n    out = torch").replace(
    "torch.relu(out) * 2", "out"
)


def test_operations_on_a_result_are_computed_before_it_is_stored() -> None:
    text = applied(ADD, "fuse")
    assert "return out\n" in text
    store = "tl.maximum(x + y, 0.0, propagate_nan=tl.PropagateNan.ALL) * 2.0"
    assert f"    tl.store(out_ptr + offsets, {store}, mask=mask)  # the sum\n" in text
    assert len(set(ADD.splitlines()) - set(text.splitlines())) == 2


@pytest.mark.parametrize(
    ("statement", "stored"),
    [
        ("out.sigmoid_()", "tl.sigmoid(x + y)"),
        ("out *= 0.5", "(x + y) * 0.5"),
        ("out = 1 - out", "1.0 - (x + y)"),
        ("out = out.abs().sqrt()", "tl.sqrt(tl.abs(x + y))"),
    ],
)
def test_statements_that_change_a_result_are_left_out(statement: str, stored: str) -> None:
    text = applied(ADD.replace("return torch.relu(out) * 2", f"{statement}\n    return out"), "fuse")
    assert f"    {statement}\n" not in text
    assert f"tl.store(out_ptr + offsets, {stored}, mask=mask)" in text


def test_a_function_that_uses_the_value_twice_gets_a_variable() -> None:
    text = applied(ADD.replace("torch.relu(out) * 2", "torch.nn.functional.silu(out)"), "fuse")
    assert "    result = x + y\n    tl.store(out_ptr + offsets, result * tl.sigmoid(result), mask=mask)" in text


def test_sixteen_bit_values_are_computed_in_float32() -> None:
    text = applied(ADD.replace("torch.relu(out) * 2", "out.exp()"), "fuse", types="*fp16")
    assert "tl.exp((x + y).to(tl.float32))" in text
    loaded = applied(BEFORE, "fuse", types="*fp16")
    assert (
        "y = tl.exp(tl.load(y_ptr + offsets, mask=mask).to(tl.float32)).to(y_ptr.dtype.element_ty)"
        in loaded.replace(
            "(tl.exp(tl.load(y_ptr + offsets, mask=mask).to(tl.float32)))",
            "tl.exp(tl.load(y_ptr + offsets, mask=mask).to(tl.float32))",
        )
    )


@pytest.mark.parametrize(
    "change",
    [
        ("torch.empty_like(x)", "torch.zeros_like(x)"),
        ("torch.relu(out) * 2", "torch.relu(out) * out.sum()"),
        ("torch.relu(out) * 2", "torch.relu(out), out"),
        ("torch.relu(out) * 2", "torch.softmax(out, -1)"),
        ("torch.relu(out) * 2", "out.double()"),
        ("torch.relu(out) * 2", "torch.relu(out, inplace=True)"),
        ("    return torch", "    add_kernel[(1,)](x, y, out, 1, BLOCK=64)\n    return torch"),
        ("(x, y, out,", "(x, out, out,"),
        ("tl.store(", "tl.atomic_add("),
        ("    tl.store(", "    y += tl.load(out_ptr + offsets, mask=mask)\n    tl.store("),
    ],
)
def test_operations_stay_if_more_than_the_result_is_used(change: tuple[str, str]) -> None:
    changed = ADD.replace(*change)
    assert changed != ADD
    assert proposed(changed, "fuse") == []


def test_operations_on_an_argument_are_computed_after_it_is_loaded() -> None:
    text = applied(BEFORE, "fuse")
    assert "    y = tl.exp(tl.load(y_ptr + offsets, mask=mask))\n" in text
    assert "    y = y.contiguous()  # weights\n" in text
    direct = ADD.replace("(x, y, out,", "(x, torch.exp(y), out,").replace("torch.relu(out) * 2", "out")
    assert "](x, y.contiguous(), out, x.numel(), BLOCK=64)" in applied(direct, "fuse")


@pytest.mark.parametrize(
    "change",
    [
        ("tl.load(y_ptr + offsets, mask=mask)", "tl.load(y_ptr + offsets, mask=mask, other=0.0)"),
        ("    return out", "    return out + y"),
        ("(x, y, out,", "(y, y, out,"),
        ("    out = torch", "    y.mul_(2)\n    out = torch"),
        ("tl.store(out_ptr", "tl.store(y_ptr"),
    ],
)
def test_operations_on_an_argument_stay_if_others_see_them_or_masked_lanes_would_change(
    change: tuple[str, str],
) -> None:
    changed = BEFORE.replace(*change)
    assert changed != BEFORE
    assert proposed(changed, "fuse") == []


def test_masked_lanes_that_keep_their_value_do_not_prevent_it() -> None:
    text = BEFORE.replace("torch.exp(y)", "torch.relu(y)").replace(
        "y_ptr + offsets, mask=mask", "y_ptr + offsets, mask=mask, other=0.0"
    )
    assert "tl.maximum(tl.load(y_ptr + offsets, mask=mask, other=0.0), 0.0, " in applied(text, "fuse")


@pytest.mark.parametrize("text", [ADD, BEFORE, BEFORE.replace("torch.exp(y)", "torch.nn.functional.silu(y)")])
def test_the_fused_kernel_computes_the_same(observe: Observing, text: str) -> None:
    fused = applied(text, "fuse")
    sizes = [{"M": 5, "N": 7}, {"M": 8, "N": 64}]
    for trace in observe(fused, "add", *sizes, original=text):
        assert not trace.faults, trace.faults
    broken = (
        fused.replace("0.0, propagate_nan", "0.5, propagate_nan")
        .replace("tl.exp(", "tl.abs(")
        .replace("tl.sigmoid", "tl.exp")
    )
    assert broken != fused
    assert any(trace.faults for trace in observe(broken, "add", *sizes, original=text))


SCALE = """

@triton.jit
def scale_kernel(in_ptr, weight_ptr, scaled_ptr, n, factor, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = where < n
    x = tl.load(in_ptr + where, mask=inside)
    weight = tl.load(weight_ptr + where, mask=inside)
    tl.store(scaled_ptr + where, x * weight * factor, mask=inside)
"""
SECOND = """\
    scaled = torch.empty_like(out)
    scale_kernel[(triton.cdiv(x.numel(), 64),)](out, y, scaled, x.numel(), 0.5, BLOCK=64)
    return scaled
"""
PAIR = ADD.replace("\n\n# mtmc", f"{SCALE}\n\n# mtmc").replace("    return torch.relu(out) * 2\n", SECOND)


def test_two_elementwise_launches_become_one() -> None:
    text = applied(PAIR, "fuse")
    assert "def add_kernel(x_ptr, y_ptr, scaled_ptr, factor, n, BLOCK: tl.constexpr):\n" in text
    assert "    result = x + y\n    tl.store(scaled_ptr + offsets, result * y * factor, mask=mask)  # the sum\n" in text
    launch = "    add_kernel[(triton.cdiv(x.numel(), 64),)](x, y, scaled, 0.5, x.numel(), BLOCK=64)\n"
    assert f"    out = torch.empty_like(x)\n    scaled = torch.empty_like(out)\n{launch}    return scaled\n" in text


def test_a_tensor_in_sixteen_bits_is_rounded_as_before() -> None:
    assert "    result = (x + y).to(tl.float16)\n" in applied(PAIR, "fuse", types="*fp16")


@pytest.mark.parametrize(
    "change",
    [
        ("return scaled", "return scaled, out"),
        ("where = tl.program_id(0) * BLOCK", "where = n - 1 - tl.program_id(0) * BLOCK"),
        ("inside = where < n", "inside = where < n - 1"),
        ("x * weight * factor, mask=inside", "x * weight * factor"),
        ("x * weight * factor, mask", "x * tl.sum(x) * factor, mask"),
        ("x * weight * factor, mask", "helper(x) * factor, mask"),
        ("    scale_kernel[(triton.cdiv(x.numel(), 64),)]", "    scale_kernel[(triton.cdiv(x.numel(), 32),)]"),
        ("0.5, BLOCK=64", "0.5, BLOCK=32"),
        ("(out, y, scaled,", "(out, y, x,"),
        ("(out, y, scaled,", "(out, out, scaled,"),
        ("    scaled = torch.empty_like(out)", "    scaled = torch.empty_like(out)\n    print(out)"),
        ("    x = tl.load(in_ptr", "    for i in range(2):\n        x = tl.load(in_ptr"),
        ("out = torch.empty_like(x)", "out = torch.ones_like(x)"),
    ],
)
def test_launches_stay_apart_if_their_elements_differ_or_others_see_the_tensor(change: tuple[str, str]) -> None:
    changed = PAIR.replace(*change)
    assert changed != PAIR
    assert proposed(changed, "fuse") == []


def test_two_fused_launches_compute_the_same(observe: Observing) -> None:
    fused = applied(PAIR, "fuse")
    sizes = [{"M": 5, "N": 7}, {"M": 8, "N": 64}]
    for trace in observe(fused, "add", *sizes, original=PAIR):
        assert not trace.faults, trace.faults
        assert [work.launch.kernel for work in trace.launches] == ["add_kernel"]
    broken = fused.replace("result * y", "result + y")
    assert any(trace.faults for trace in observe(broken, "add", *sizes, original=PAIR))


def test_edits_of_launches_are_told_from_edits_of_kernels() -> None:
    assert not any(within_kernels(item, facts(ADD)) for item in proposed(ADD, "fuse"))
    equal = ADD.replace("tl.load(y_ptr + offsets, mask=mask)", "tl.load(x_ptr + offsets, mask=mask, other=0.0)")
    assert [within_kernels(item, facts(equal)) for item in proposed(equal, "hoist")] == [True]
