"""Pooling one dimension at a time equals pooling of whole windows, and is proposed if windows overlap."""

from __future__ import annotations

import random

import pytest
import torch

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.graph import Graph, GraphInput, InputKind, Node, Ref, TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.regions import analyse
from mtmc_lsp.rewrites import ALGEBRA
from mtmc_lsp.rewrites.pooling import by_dimension
from mtmc_lsp.schedule.tile_configs import default_config
from mtmc_lsp.tuning.kernel_cost import kernel_cost
from tests.codegen.families import source
from tests.codegen.harness import compile_errors, verified
from tests.planning.situations import H200, act, proposed, region_and_program, start, with_algebra

RULE = "separable-pooling"


def _type(t: torch.Tensor) -> TensorType:
    return TensorType(tuple(map(Size.of, t.shape)), "float32", tuple(map(Size.of, t.stride())))


def _graph(x: torch.Tensor, op: str, args: tuple[object, ...]) -> Graph:
    result = _pooled(op, x, args)
    node = Node("pool", op, (Ref("x"), *args), {}, (_type(result),), 1)  # type: ignore[arg-type]
    return Graph((GraphInput("x", "x", InputKind.ARGUMENT, _type(x)),), (node,), (Ref("pool"),), "tensor", {})


def _pooled(op: str, x: torch.Tensor, args: tuple[object, ...]) -> torch.Tensor:
    result: torch.Tensor = getattr(torch.ops.aten, op.split(".")[1])(x, *args)
    return result


@pytest.mark.parametrize("seed", range(4))
def test_values_shapes_and_strides_are_the_same_for_all_arguments(seed: int) -> None:
    draw, generator, matched = random.Random(seed), torch.Generator().manual_seed(seed), 0
    for _ in range(100):
        spatial, is_max = draw.choice((2, 3)), draw.random() < 0.5
        kernel_sizes = [draw.randint(1, 4) for _ in range(spatial)]
        steps = draw.choice(([], [draw.randint(1, 3) for _ in range(spatial)]))
        paddings = [draw.randint(0, kernel_size // 2) for kernel_size in kernel_sizes]
        x = torch.randn(2, 3, *(draw.randint(7, 11) for _ in range(spatial)), generator=generator)
        if draw.random() < 0.3:
            x = x.contiguous(memory_format=torch.channels_last if spatial == 2 else torch.channels_last_3d)
        if draw.random() < 0.3:
            x[draw.randint(0, 1), 0, 3] = float("nan")
        ceil = draw.random() < 0.5
        last: list[object] = (
            [[draw.randint(1, 2) for _ in kernel_sizes], ceil] if is_max else [ceil, draw.random() < 0.5]
        )
        args = tuple(tuple(a) if isinstance(a, list) else a for a in (kernel_sizes, steps, paddings, *last))
        op = f"aten.{'max' if is_max else 'avg'}_pool{spatial}d.default"
        graph = _graph(x, op, args)
        edit = by_dimension(graph, graph.nodes[0])
        if edit is None:
            continue
        matched += 1
        values = {"x": x}
        for node in edit.added:
            first = node.args[0]
            assert isinstance(first, Ref)
            values[node.name] = _pooled(node.op, values[first.name], node.args[1:])
            assert _type(values[node.name]) == node.type
        torch.testing.assert_close(
            values[edit.result.name],
            _pooled(op, x, args),
            rtol=0 if is_max else 1e-6,
            atol=0 if is_max else 1e-6,
            equal_nan=True,
        )
    assert matched > 15


CASES = {
    "images": "x=F[B,3,9,8]: F.max_pool2d(x * 2, 4, 1, 1)",
    "volumes, dilated": "x=F[B,2,8,9,7]: F.max_pool3d(x, 3, 2, 1, dilation=(1, 2, 2), ceil_mode=True) + 1",
    "means of what is inside": "x=F[B,2,9,8]: F.avg_pool2d(x, 4, 3, 1, ceil_mode=True, count_include_pad=False)",
    "means of volumes": "x=F[B,2,5,6,7]: F.avg_pool3d(x, 3, 2, 1).exp()",
}


@pytest.mark.parametrize("name", CASES)
def test_pooling_by_dimension_equals_the_users_code(name: str, captured) -> None:
    text = source(CASES[name], "f32")
    capture = captured(text, "f")
    candidate = with_algebra(capture, start(capture, text), RULE)
    node = next(node.name for node in capture.graph.nodes if "pool" in node.op)
    for part in ("along", "across"):
        candidate = act(capture, candidate, ActionKind.FUSE, f"{node}_{part}", config={})
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
    assert not compile_errors(capture, candidate, ("sm_90",))


NO_MATCH = {
    "windows side by side": "x=F[B,3,9,8]: F.max_pool2d(x, 2) * 2",
    "one dimension": "x=F[B,3,9,8]: F.max_pool2d(x, (3, 1), 1) * 2",
    "another divisor": "x=F[B,3,9,8]: F.avg_pool2d(x, 3, 1, divisor_override=2) * 2",
    "lines": "x=F[B,3,9]: F.max_pool1d(x, 3, 1) * 2",
}


@pytest.mark.parametrize("name", NO_MATCH)
def test_windows_that_do_not_overlap_are_not_separated(name: str, captured) -> None:
    text = source(NO_MATCH[name], "f32")
    capture = captured(text, "f")
    node = next(node.name for node in capture.graph.nodes if "pool" in node.op)
    with pytest.raises(CannotCode):
        act(capture, start(capture, text), ActionKind.ALGEBRA, rule=RULE, node=node, kernels=[])


def test_means_in_16_bit_dtypes_are_not_rounded_twice(captured) -> None:
    rule = next(item for item in ALGEBRA if item.name == RULE)
    for pool, offered in (("avg", False), ("max", True)):
        graph = captured(source(f"x=F[B,3,9,8]: F.{pool}_pool2d(x, 3, 1)", "f16"), "f").graph
        node = next(node for node in graph.nodes if "pool" in node.op)
        assert (rule.match(graph, node) is not None) is offered


def test_it_is_proposed_for_large_windows_that_overlap(captured) -> None:
    for step, offered in ((1, True), (4, False)):
        text = source(f"x=F[32,64,512,512]: F.max_pool2d(x, 4, {step})", "f32")
        capture = captured(text, "f")
        actions = proposed(capture, start(capture, text), ActionKind.ALGEBRA, device=H200)
        assert any(action.params.get("rule") == RULE for action in actions) is offered


def test_each_thread_has_one_of_the_columns_that_windows_slide_along(captured) -> None:
    """A thread would load several columns one by one, and the loads of a warp would not be coalesced."""
    configs = {}
    for name, case in (
        ("lines", "x=F[64,128,4096]: F.max_pool1d(x, 8, 1)"),
        ("rows", "x=F[8,64,64,512]: F.max_pool2d(x, (3, 1), 1)"),
    ):
        ir, region = region_and_program(captured(source(case, "f32"), "f"))
        configs[name] = default_config(ir, region, H200)
    assert configs["lines"].elements == 32 * configs["lines"].warps
    assert configs["rows"].elements > 32 * configs["rows"].warps


def test_nested_pooling_is_expensive_if_windows_overlap(captured) -> None:
    """The inner result is recomputed for every window that contains it."""
    for step, is_expensive in ((5, False), (1, True)):
        case = f"x=F[32,64,256,256]: F.max_pool2d(F.max_pool2d(x, (1, 5), 1), (5, 1), ({step}, 1))"
        ir, whole = region_and_program(captured(source(case, "f32"), "f"))
        regions = [whole, *(analyse(ir, (node,)) for node in whole.nodes)]
        both, first, second = (kernel_cost(ir, r, default_config(ir, r, H200), H200).us for r in regions)
        assert (both > first + second) is is_expensive
