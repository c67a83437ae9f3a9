"""Kernels that share a launch: when that is legal, correct and proposed."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.actions.side_by_side import SideBySide
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.codegen.kernel.kernel import Kernel, kernel_source
from mtmc_lsp.codegen.module.side_by_side import side_by_side
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.planners.roofline import RooflinePlanner
from tests.codegen.harness import compile_errors, verified
from tests.planning.situations import H200, act, fully_fused, schedule_of, situation, start, timing

TARGETS = {
    "rows of other lengths": """import torch
# mtmc: q=f32[M,D] k=f32[N,E] M=24 D=40 N=10 E=70
def f(q, k):
    return torch.softmax(q * 2.0, -1), torch.tanh(k) + 1.0
""",
    "the same of several tensors": """import torch
def norm(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
# mtmc: q=f32[B,H,S,D] k=f32[B,G,S,D] u=f32[D] v=f32[D] B=2 H=6 G=2 S=9 D=32
def f(q, k, u, v):
    return norm(q, u), norm(k, v)
""",
    "a scan beside columns": """import torch
# mtmc: x=f32[M,D] y=f32[D,M] M=24 D=40
def f(x, y):
    return torch.cumsum(x, -1), y.amax(0), torch.relu(y) * 0.5
""",
    "products": """import torch
# mtmc: x=f32[B,M,K] a=f32[B,K,N] b=f32[K,P] B=3 M=20 K=24 N=18 P=33
def f(x, a, b):
    return torch.relu(torch.bmm(x, a)), torch.sigmoid(x @ b)
""",
    "what is read by a third": """import torch
# mtmc: x=f32[M,D] y=f32[N,D] M=24 N=10 D=40
def f(x, y):
    a, b = torch.softmax(x, -1), torch.softmax(y * 3.0, -1)
    return torch.log_softmax(a @ b.t(), -1)
""",
    "inputs that change": """import torch
# mtmc: x=f32[M,D] y=f32[N,D] g=f32[M,D] h=f32[N,D] M=24 N=10 D=40
def f(x, y, g, h):
    x.add_(g, alpha=-0.1)
    y.mul_(0.9).sub_(h)
    return g.sum(-1)
""",
    "numbers that are drawn": """import torch
import torch.nn.functional as F
# mtmc: x=f32[M,D] y=f32[N,D] M=24 N=10 D=40
def f(x, y):
    return F.dropout(x, 0.25) * 2.0, F.dropout(y, 0.5) + 1.0
""",
}


def kernels(capture: Capture, text: str) -> Candidate:
    """The target as kernels from the planner's fusions; with several softmaxes, only these become kernels."""
    candidate = start(capture, text)
    soft = [node.name for node in capture.graph.nodes if "softmax" in node.op]
    if len(soft) < 2:
        return fully_fused(capture, candidate)
    for name in soft:
        candidate = act(capture, candidate, ActionKind.FUSE, name, config={})
    return candidate


def in_one_launch(capture: Capture, candidate: Candidate, *keys: str) -> Candidate:
    """Put the given kernels, or all, in one launch."""
    selected = keys or tuple(plan.key for plan in schedule_of(candidate).kernels)
    return act(capture, candidate, ActionKind.SIDE_BY_SIDE, *selected, launches=[list(selected)])


def kernel_keys(candidate: Candidate) -> list[str]:
    """Keys of all kernels of the candidate."""
    return [plan.key for plan in schedule_of(candidate).kernels]


@pytest.mark.parametrize("name", TARGETS)
def test_kernels_in_one_launch_compute_the_same(name: str, captured) -> None:
    text = TARGETS[name]
    capture = captured(text, "f")
    before = kernels(capture, text)
    keys = kernel_keys(before)[:2] if name == "what is read by a third" else kernel_keys(before)
    assert len(keys) > 1, "there is something to join"
    after = in_one_launch(capture, before, *keys)
    assert len(schedule_of(after).launches) == 1
    code = after.code
    assert code is not None
    assert code.block.count("num_warps=") == len(kernel_keys(before)) - len(keys) + 1, "launches"
    assert verified(capture, after).reason == ""
    assert compile_errors(capture, after, ["sm_80", "sm_90"]) == []
    assert after.source == in_one_launch(capture, before, *keys).source, "the same bytes"


def test_equal_kernels_become_one_function(captured) -> None:
    text = TARGETS["the same of several tensors"]
    capture = captured(text, "f")
    code = in_one_launch(capture, kernels(capture, text)).code
    assert code is not None
    assert code.block.count("tl.rsqrt(") == 1
    assert code.block.count("f_out_0_kernel(") == 3, "one function and two calls"


def test_a_kernel_that_reads_another_ones_result_cannot_share_its_launch(captured) -> None:
    text = TARGETS["what is read by a third"]
    capture = captured(text, "f")
    before = kernels(capture, text)
    assert len(kernel_keys(before)) == 3
    with pytest.raises(CannotCode, match="one of the kernels reads a result of another"):
        in_one_launch(capture, before)


def test_nor_can_a_kernel_that_reads_it_through_a_torch_call(captured) -> None:
    text = """import torch
# mtmc: x=f32[M,M] M=24
def f(x):
    a = torch.softmax(x, -1)
    return torch.softmax(torch.linalg.inv(a + torch.eye(24)), -1)
"""
    capture = captured(text, "f")
    before = kernels(capture, text)
    assert len(kernel_keys(before)) == 2
    with pytest.raises(CannotCode, match="one of the kernels reads a result of another"):
        in_one_launch(capture, before)


def test_only_kernels_with_a_single_launch_can_share_one(captured) -> None:
    text = TARGETS["rows of other lengths"]
    capture = captured(text, "f")
    before = kernels(capture, text)
    soft = next(plan for plan in schedule_of(before).kernels if "softmax" in plan.key)
    persistent = act(capture, before, ActionKind.AUTOTUNE, *soft.nodes, config={"persist": 3})
    with pytest.raises(CannotCode, match="a persistent kernel fills the device alone"):
        in_one_launch(capture, persistent)
    together = in_one_launch(capture, before)
    with pytest.raises(CannotCode, match="the launch runs other kernels too"):
        act(capture, together, ActionKind.AUTOTUNE, *soft.nodes, config={"persist": 3})
    with pytest.raises(CannotCode, match="no kernel ends with mul"):
        in_one_launch(capture, before, soft.key, "mul")
    with pytest.raises(CannotCode, match="2 to 8 kernels"):
        in_one_launch(capture, before, soft.key)


def test_a_kernel_of_a_shared_launch_can_be_tuned_and_removed(captured) -> None:
    text = TARGETS["rows of other lengths"]
    capture = captured(text, "f")
    together = in_one_launch(capture, kernels(capture, text))
    soft = next(plan for plan in schedule_of(together).kernels if "softmax" in plan.key)
    tuned = act(capture, together, ActionKind.AUTOTUNE, *soft.nodes, config={"warps": 8})
    assert [launch.num_warps for launch in tuned.launches] == [8]
    assert verified(capture, tuned).reason == ""
    alone = schedule_of(together).without(soft.key)
    assert alone.launches == ()


def test_short_kernels_are_proposed_and_long_ones_are_not(captured) -> None:
    text = TARGETS["the same of several tensors"]
    capture = captured(text, "f")
    before = kernels(capture, text)
    state = situation(capture, before, has_gpu=True, device=H200)
    [action] = SideBySide().propose(state)
    assert action.text == "Run the kernels for result 1 and result 2 in one launch"
    assert action.expected.saved_us == pytest.approx(H200.launch_us, rel=0.2), "a launch less"
    after = BuiltinCoder().write(capture, before, action)
    assert len(after.launches) == 1
    assert not list(SideBySide().propose(situation(capture, after, has_gpu=True, device=H200))), "once"
    assert not list(SideBySide().propose(situation(capture, before, device=H200))), "never unmeasured"
    slow = replace(H200, bandwidth=H200.bandwidth / 1e6)
    assert not list(SideBySide().propose(situation(capture, before, has_gpu=True, device=slow)))


def test_parallel_chains_share_launches(captured) -> None:
    text = """import torch
def chain(x, w):
    return torch.softmax(torch.softmax(x, -1) @ w, -1)
# mtmc: x=f32[M,D] y=f32[N,D] u=f32[D,D] v=f32[D,D] M=24 N=10 D=40
def f(x, y, u, v):
    return chain(x, u), chain(y, v)
"""
    capture = captured(text, "f")
    before = kernels(capture, text)
    state = situation(capture, before, has_gpu=True, device=H200)
    [action] = SideBySide().propose(state)
    groups = action.params["launches"]
    assert isinstance(groups, list)
    assert len({key for group in groups for key in group}) == len(kernel_keys(before)), "all of them"
    assert len(groups) == len(kernel_keys(before)) // 2
    after = BuiltinCoder().write(capture, before, action)
    assert verified(capture, after).reason == ""


def part(name: str, rows: str, second: str = "", warps: int = 4) -> Kernel:
    """A kernel that fills a buffer; its grid has a second dimension if ``second`` is given."""
    body = ["row = tl.program_id(0)", *(["batch = tl.program_id(1)"] if second else []), "tl.store(y_ptr + row, N)"]
    return Kernel(
        name=name,
        source=kernel_source(name, ["y_ptr", "N"], f"What {name} does.", body),
        tensors=(),
        outputs=(("y_ptr", Ref(name)),),
        sizes=(("N", Size.symbol(name)),),
        constexprs={},
        grid=(rows, *([second] if second else [])),
        grid_sizes={"n_rows": Size.symbol(name)},
        num_warps=warps,
        num_stages=2,
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.sampled_from([1, 4, 8])), min_size=2, max_size=8))
def test_every_program_of_every_part_runs_once(shapes: list[tuple[int, int, int]]) -> None:
    parts = [
        part(f"p{i}", str(rows), str(second_size) if second_size else "", w)
        for i, (rows, second_size, w) in enumerate(shapes)
    ]
    kernel = side_by_side("all", parts, "All of them.")
    numbers: dict[str, int] = {}
    for name, text in kernel.numbers.items():
        numbers[name] = eval(text, {}, numbers)
    assert kernel.num_warps == max(w for *_, w in shapes)
    # Execute the launch code as Python, with functions that record their arguments.
    pointers = {pointer: i for i, (pointer, _) in enumerate(kernel.outputs)}
    ran: dict[int, list[tuple[int, ...]]] = {i: [] for i in range(len(parts))}

    def note(*arguments: int) -> None:
        *indices, pointer, _ = arguments
        ran[pointer].append(tuple(indices))

    scope = {**numbers, **pointers, **{name: 0 for name, _ in kernel.sizes}, **dict.fromkeys(kernel.functions, note)}
    body = textwrap.dedent(kernel.source.partition('"""All of them."""')[2].replace("tl.program_id(0)", "here"))
    for program_id in range(eval(kernel.grid[0], {}, numbers)):
        exec(body, {**scope, "here": program_id})
    for i, (rows, second_size, _) in enumerate(shapes):
        expected = [
            (row, *([other] if second_size else [])) for other in range(max(1, second_size)) for row in range(rows)
        ]
        assert ran[i] == expected, "each program of the part once, in its own order"


def test_a_kernel_that_needs_the_whole_grid_is_rejected() -> None:
    other = replace(
        part("q", "n_rows"), source=part("q", "n_rows").source.replace("row, N)", "row, tl.num_programs(0))")
    )
    with pytest.raises(CannotCode, match="q cannot share a launch"):
        side_by_side("all", [part("p", "n_rows"), other], "Both.")


@pytest.mark.parametrize("graph_us", [30.0, None])
def test_in_launch_bound_calls_shared_launches_come_before_a_cuda_graph(graph_us: float | None, captured) -> None:
    text = TARGETS["the same of several tensors"]
    capture = captured(text, "f")
    candidate = kernels(capture, text)
    fuse = MacroAction(ActionKind.FUSE, ("mul",), (0, 0))
    timed = timing(60.0, 2.0, graph_us)
    step = Step(1, fuse, StepStatus.ACCEPTED, "", candidate=candidate, timing=timed)
    ranked = RooflinePlanner().ranked(State(capture, candidate, (step,), H200, True))
    assert ranked[0].kind is ActionKind.SIDE_BY_SIDE
    assert (ActionKind.CUDA_GRAPH in {action.kind for action in ranked}) is (graph_us is not None)
