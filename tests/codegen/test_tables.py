"""Tensors that depend only on sizes: expensive ones are computed once for each device and size, cheap ones inside the kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtmc_lsp.ir.constant_tables import constant_tables
from mtmc_lsp.verify.cases import Case, version_cases
from tests.codegen.checker import Checker, planned, start, with_kernel

HEAD = "import math\nimport torch\nimport torch.nn.functional as F\n\n\n"

ROPE = (
    HEAD
    + """\
# mtmc: q=f32[B,S,D] base=10000.0 B=4 S=40 D=16
def f(q, base):
    d = q.shape[-1]
    inverse = 1.0 / (base ** (torch.arange(0, d, 2, device=q.device).float() / d))
    angles = torch.outer(torch.arange(q.shape[1], device=q.device).float(), inverse)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    rotated = torch.cat((-q[..., d // 2:], q[..., :d // 2]), -1)
    return q * cos + rotated * sin
"""
)
WINDOWS = (
    HEAD
    + """\
# mtmc: x=f32[B,4,16,16] B=3
def f(x):
    regions = torch.zeros((1, 8, 8, 1), device=x.device)
    count = 0
    for rows in (slice(0, -4), slice(-4, -2), slice(-2, None)):
        for columns in (slice(0, -4), slice(-4, -2), slice(-2, None)):
            regions[:, rows, columns, :] = count
            count += 1
    windows = regions.view(1, 2, 4, 2, 4, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16)
    mask = windows.unsqueeze(1) - windows.unsqueeze(2)
    return torch.softmax(x + mask.masked_fill(mask != 0, -100.0), -1)
"""
)
POSITIONS = (
    HEAD
    + """\
# mtmc: x=f32[B,S,D] B=4 S=24 D=16
def f(x):
    positions = torch.arange(x.shape[1], device=x.device).unsqueeze(1)
    rates = torch.exp(torch.arange(0, 16, 2, device=x.device) * (-math.log(10000.0) / 16))
    table = torch.zeros(x.shape[1], 16, device=x.device)
    table[:, 0::2] = torch.sin(positions * rates)
    table[:, 1::2] = torch.cos(positions * rates)
    return (x + table).relu()
"""
)
TABLES = {"rotary embedding": ROPE, "window mask": WINDOWS, "sinusoidal positions": POSITIONS}


@pytest.mark.parametrize("name", TABLES)
def test_an_expensive_table_is_computed_once_and_read_by_the_kernels(name: str, checker: Checker) -> None:
    capture = checker.capture(TABLES[name])
    candidate = planned(capture)
    assert "def f_tables(" in candidate.source
    launcher = candidate.source.partition("def f_launch(")[2].partition("\n# mtmc: end")[0]
    assert "f_tables(" in launcher
    assert "arange" not in launcher and "torch.ops" not in launcher
    cases = [case for case in version_cases(capture, interpreted=True, seed=2) if case.kind == "values"]
    assert checker.first_failure(capture, candidate, cases) == ""


SHARED_VIEW = (
    HEAD
    + """\
# mtmc: edges=f32[B,9] values=f32[B,9] B=4
def f(edges, values):
    points = torch.linspace(0.0, 1.0, steps=16, device=edges.device).expand([edges.shape[0], 16]).contiguous()
    cells = torch.searchsorted(torch.cumsum(edges.abs(), -1), points).clamp(0, 8)
    return (points - torch.gather(edges, 1, cells)) / torch.gather(values, 1, cells)
"""
)


def test_a_kernel_reads_the_view_of_a_table_whose_copy_torch_reads(checker: Checker) -> None:
    capture = checker.capture(SHARED_VIEW)
    words = [node.word for node in capture.graph.nodes]
    after = capture.graph.nodes[words.index("searchsorted") + 1 :]
    candidate = with_kernel(capture, start(capture), [node.name for node in after])
    assert "def f_tables(" in candidate.source
    cases = [case for case in version_cases(capture, interpreted=True, seed=2) if case.kind == "values"]
    assert checker.first_failure(capture, candidate, cases) == ""


CHEAP = {
    "causal mask": "return torch.softmax((x @ x.transpose(1, 2)).masked_fill(torch.ones(9, 9, device=x.device).triu(1).bool(), -1e9), -1)",
    "positions": "return x * torch.arange(9, device=x.device)[:, None]",
    "a table that the caller gets": "t = torch.arange(9, device=x.device).float().cos()\n    return x * t[:, None], t",
    "a view of a table that the caller gets": "t = torch.arange(9, device=x.device).float().cos()\n    return x * t[:, None], t[:4]",
    "a table that is larger than the arguments": "return x.sum() * torch.outer(torch.arange(64, device=x.device), torch.arange(64, device=x.device)).cos().sum()",
    "random numbers": "return x * torch.rand(9, 9, device=x.device).cos()",
    "a factor at run time": "return x * (torch.arange(9, device=x.device) * s)[:, None]",
}  # fmt: skip


@pytest.mark.parametrize("name", CHEAP)
def test_other_constants_are_no_tables(name: str, checker: Checker) -> None:
    capture = checker.capture(f"{HEAD}# mtmc: x=f32[B,9,9] s=0.5 B=4\ndef f(x, s):\n    {CHEAP[name]}\n")
    table = constant_tables(capture.graph)
    escaping = {ref.name for ref in capture.graph.escaping}
    assert not table.nodes & escaping
    if name != "a table that is larger than the arguments":
        assert table.results == ()
    assert all(capture.graph.node(result).type.numel.value(capture.graph.sizes) <= 4 * 81 for result in table.results)


def tables_of(source: str, synchronize: str = "None") -> Callable[..., Any]:
    start = source.index("_F_TABLES = {}")
    namespace: dict[str, Any] = {"torch": torch}
    text = source[start : source.index("def f_launch(")]
    exec(text.replace("torch.cuda.synchronize()", synchronize), namespace)
    function: Callable[..., Any] = namespace["f_tables"]
    return function


def test_a_table_is_made_anew_for_another_size_number_or_device_and_kept_otherwise(checker: Checker) -> None:
    tables = tables_of(planned(checker.capture(ROPE)).source)
    q = torch.zeros(1, 5, 16)
    first = tables(q, 5, 10000.0)
    assert tables(torch.ones(3, 5, 16, dtype=torch.float16), 5, 10000.0)[0] is first[0]
    assert tables(q, 6, 10000.0)[0].shape == (6, 16)
    assert not torch.equal(tables(q, 5, 500.0)[0], first[0])
    assert tables(q.to("meta"), 5, 10000.0)[0].device.type == "meta"
    assert tables(q, 5, 10000.0)[0] is first[0]


def test_few_tables_are_kept_and_none_under_a_tracer(checker: Checker) -> None:
    tables = tables_of(planned(checker.capture(ROPE)).source)
    cache = tables.__globals__["_F_TABLES"]
    with torch._subclasses.fake_tensor.FakeTensorMode():
        tables(torch.zeros(1, 3, 16), 3, 10000.0)
    assert cache == {}
    for size in range(1, 20):
        assert tables(torch.zeros(1, size, 16), size, 10000.0)[0].shape == (size, 16)
    assert len(cache) == 4
    with torch.inference_mode():
        assert not tables(torch.zeros(1, 30, 16), 30, 10000.0)[0].is_inference()


def test_tables_of_tensors_without_data_need_no_gpu(checker: Checker) -> None:
    """The process that compiles kernels calls the launcher on such tensors, and cannot use the GPU."""
    tables = tables_of(planned(checker.capture(ROPE)).source, "1 / 0")
    assert tables(torch.zeros(1, 5, 16, device="meta"), 5, 10000.0)[0].shape == (5, 16)
    assert tables.__globals__["_F_TABLES"] == {}


LEFT_TO_TORCH = {
    "positions": "return (x.tanh() * 2).index_select(2, torch.arange(9, device=x.device).flip(0))",
    "numbers": "return torch.searchsorted(x.sort().values, torch.zeros((4, 9, 1), device=x.device).cos()) + (x.tanh() * 2)",
}
CREATED = re.compile(r"torch\.(arange|flip|zeros|cos)\(")


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_cheap_tables_that_no_kernel_computes_are_kept(name: str, checker: Checker) -> None:
    capture = checker.capture(f"{HEAD}# mtmc: x=f32[4,9,9]\ndef f(x):\n    {LEFT_TO_TORCH[name]}\n")
    nodes = [node.name for node in capture.graph.nodes if node.word in ("tanh", "mul")]
    candidate = with_kernel(capture, start(capture), nodes)
    before, _, launcher = candidate.source.partition("def f_launch(")
    tables = before.partition("def f_tables(")[2]
    assert len(CREATED.findall(tables)) == 2 and not CREATED.search(launcher)
    cases = [case for case in version_cases(capture, interpreted=True, seed=2) if case.kind == "values"]
    assert checker.first_failure(capture, candidate, cases) == ""


def test_one_cheap_operation_is_not_worth_a_function(checker: Checker) -> None:
    code = "return (x.tanh() * 2).index_select(2, torch.arange(9, device=x.device))"
    capture = checker.capture(f"{HEAD}# mtmc: x=f32[4,9,9]\ndef f(x):\n    {code}\n")
    nodes = [node.name for node in capture.graph.nodes if node.word in ("tanh", "mul")]
    assert "_F_TABLES" not in with_kernel(capture, start(capture), nodes).source


WRITTEN_INTO = {
    "the sums of a scatter": "return torch.zeros(9, 5, device=x.device).index_add(0, i, x * 2), turned",
    "a result": "y = torch.zeros(9, 5, device=x.device)\n    return y, x * 2, turned",
    "a view of a result": "y = torch.zeros(9, 5, device=x.device)\n    return y.t(), y[0, 0] + x * 2, turned",
}


@pytest.mark.parametrize("name", WRITTEN_INTO)
def test_a_tensor_that_something_may_write_into_is_made_in_each_call(name: str, checker: Checker) -> None:
    code = f"turned = x.index_select(1, torch.arange(5, device=x.device).flip(0))\n    {WRITTEN_INTO[name]}"
    capture = checker.capture(f"{HEAD}# mtmc: x=f32[N,5] i=i64[N]@0..8 N=12\ndef f(x, i):\n    {code}\n")
    nodes = [node.name for node in capture.graph.nodes if node.word in ("mul", "index_add", "add")]
    candidate = with_kernel(capture, start(capture), nodes)
    created = CREATED.findall(candidate.source.partition("def f_launch(")[2])
    assert created == ["zeros"], "the other two are kept"
    cases = [Case(dict(capture.graph.sizes), "normal", seed) for seed in range(3)]
    assert checker.first_failure(capture, candidate, cases) == ""
