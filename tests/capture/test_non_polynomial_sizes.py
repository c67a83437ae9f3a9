"""Non-polynomial sizes: the export stops at the first one, gives a size a unit or makes it constant, and restarts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtmc_lsp.capture.worker import export as exporting
from mtmc_lsp.capture.worker import graph_reader as reading
from mtmc_lsp.capture.worker.export import export_graph
from mtmc_lsp.capture.worker.graph_reader import InputTensor
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.sizes import conditions_hold
from mtmc_lsp.core.workload import Target, TargetKind
from tests.codegen.harness import fused, verified

TARGET = Target(__file__, "f", TargetKind.FUNCTION, 1, 1)
FUNCTIONS = {
    "strided": (lambda x, w: torch.relu(torch.nn.functional.conv2d(x, w, stride=2)), True),
    "pooled": (lambda x, w: torch.nn.functional.max_pool2d(torch.nn.functional.conv2d(x, w), 2) * 2, True),
    "neither": (lambda x, w: torch.relu(x).sum(-1, keepdim=True) * x, False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes_in_divisions_become_constant_with_a_single_complete_export(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, is_constant = FUNCTIONS[name]
    programs: list[Any] = []

    class Reader(reading.Reader):
        def __init__(self, program: Any, *rest: Any) -> None:
            super().__init__(program, *rest)
            programs.append(program)

    monkeypatch.setattr(exporting, "Reader", Reader)
    inputs = [
        InputTensor("x", "x", InputKind.ARGUMENT, torch.rand(5, 3, 20, 24)),
        InputTensor("w", "self.w", InputKind.PARAMETER, torch.rand(7, 3, 3, 3)),
    ]
    graph, notes = export_graph(function, inputs, TARGET, {}, repr, [], windows_vary=False)
    assert len(programs) == 2, "the exported program and the decomposed program"
    assert not notes
    assert [size.is_constant for size in graph.inputs[0].type.shape[2:]] == [is_constant] * 2
    batch = graph.inputs[0].type.shape[0]
    assert not batch.is_constant and batch.value(graph.sizes) == 5


def test_sizes_that_torch_derives_from_others_have_their_values() -> None:
    """The workload names s + 1, the number of keys, and not s. ``p`` has 2 s + 1 rows."""
    inputs = [
        InputTensor(name, name, InputKind.ARGUMENT, torch.rand(2, rows, 4), size_names=("B", size, "D"))
        for name, rows, size in (("q", 7, "T"), ("k", 7, "T"), ("p", 13, "2*T-1"))
    ]

    def scores(q: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        relative = q @ p.transpose(1, 2)
        return (q @ k.transpose(1, 2) + relative[..., : p.shape[1] // 2 + 1]).softmax(-1)

    graph, _ = export_graph(scores, inputs, TARGET, {}, repr, [])
    lengths = [[size.value(graph.sizes) for size in item.type.shape] for item in graph.inputs]
    assert lengths == [[2, 7, 4], [2, 7, 4], [2, 13, 4]]
    assert not graph.inputs[1].type.shape[1].is_constant


def test_a_data_dependent_branch_is_refused() -> None:
    inputs = [InputTensor("x", "x", InputKind.ARGUMENT, torch.rand(4, 6))]
    with pytest.raises(exporting.TargetUnsupported):
        export_graph(lambda x: x if x.sum() > 0 else -x, inputs, TARGET, {}, repr, [])


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("x.view(x.shape[0], x.shape[1] // 4, 4) * 2", "T is fixed at 32, because of line 4: `y = {}`"),
        ("x.unfold(1, 8, 4).sum(-1)", "T must be a multiple of 4, because of line 4: `y = {}`"),
        ("x[:, x.shape[1] // 2 :] * 2", "T is fixed at 32, because of line 4: `y = {}`"),
        ("x[:, 1:] - x[:, :-1]", ""),
        ("torch.adaptive_avg_pool1d(x, 4)", "T must be a multiple of 4, because of line 4: `y = {}`"),
        ("torch.adaptive_avg_pool1d(x, 5)", "T is fixed at 32, because of line 4: `y = {}`"),
        ("torch.adaptive_avg_pool1d(x, 1)", ""),
        (
            "x.view(-1, 8) if x.shape[1] == 32 else x * 2",
            "T is fixed at 32, because torch traced the target for this value only",
        ),
    ],
)
def test_a_note_names_the_line_that_makes_a_named_size_constant(captured, body: str, note: str) -> None:
    text = f"import torch\n# mtmc: x=f32[B,T] B=4 T=32\ndef f(x):\n    y = {body}\n    return y.softmax(-1)\n"
    assumed = captured(text, "f").workload.assumed
    assert assumed == ((note.format(body),) if note else ())


BRANCHES = {
    "a remainder": ("y = F.pad(x, (0, 1)) if x.shape[1] % 2 else x", "T % 2 != 0"),
    "no remainder": ("y = F.pad(x, (0, 1)) if x.shape[0] % 2 else x", "B % 2 == 0"),
    "another size": ("y = x * 2 if x.shape[0] != x.shape[1] else x", "B != T"),
    "a product": ("y = x * 2 if (x.shape[0] + 1) * 4 > x.shape[1] else x", "(4 * B) + 4 > T"),
    "a quotient": ("y = x * 2 if x.shape[1] / x.shape[0] > 3.5 else x", "(T / B) > 3.5"),
    "a fraction": ("y = x * 2 if x.shape[1] * 0.5 > 10 else x", "(0.5 * T) > 10"),
    "bits": ("y = x * 2 if x.shape[0] & (x.shape[0] - 1) == 0 else x", "(B & (B + -1)) == 0"),
    "a difference": ("y = x * 2 if x.shape[1] - x.shape[0] >= 0 else x", "(T + (-1 * B)) >= 0"),
    "a minimum": ("y = x * 2 if min(x.shape[0], x.shape[1]) > 5 else x", "B < T and B > 5", "min(T, B) > 5"),
}
"""A statement, and the condition on the sizes that it becomes. Versions of torch differ in the condition of a minimum."""


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_on_sizes_in_user_code_become_conditions(captured, name: str) -> None:
    body, *expected = BRANCHES[name]
    text = f"import torch\nimport torch.nn.functional as F\n# mtmc: x=f32[B,T] B=8 T=33\ndef f(x):\n    {body}\n    return y.exp()\n"
    graph = captured(text, "f").graph
    assert [str(size) for size in graph.inputs[0].type.shape] == ["B", "T"]
    grid = [{"B": b, "T": t} for b in (2, 3, 8, 10, 33) for t in (2, 4, 20, 33, 44)]
    held = [conditions_hold(graph.conditions, sizes) for sizes in grid]
    assert held in [[conditions_hold([text], sizes) for sizes in grid] for text in expected], graph.conditions


FLOATS = {
    "a root": "y = x / x.shape[1] ** 0.5",
    "a reciprocal": "y = x * (1 / x.shape[1])",
    "a half": "y = x.sum(-1, keepdim=True) / ((x.shape[1] - 1) * 0.5)",
    "a truncated number": "y = x[:, : int(x.shape[1] * 0.75)] * 2",
    "a rounded number": "y = x[:, : round(x.shape[1] / 3)] * 2",
}


@pytest.mark.parametrize("name", FLOATS)
def test_sizes_in_fractional_operands_become_constant(captured, name: str) -> None:
    """Such operands used to be lost."""
    text = f"import torch\n# mtmc: x=f32[B,T] B=8 T=33\ndef f(x):\n    {FLOATS[name]}\n    return y.softmax(-1)\n"
    capture = captured(text, "f")
    assert [str(size) for size in capture.graph.inputs[0].type.shape] == ["B", "33"]
    assert capture.workload.assumed == (f"T is fixed at 33, because of line 4: `{FLOATS[name]}`",)
    assert verified(capture, fused(capture, text)).reason == ""


@pytest.mark.parametrize("body", ["x / math.sqrt(x.shape[0])", "x * float(len(x))", "x * math.log(x.shape[0])"])
def test_a_size_that_the_code_makes_a_number_is_fixed_with_its_line(body: str, captured) -> None:
    text = f"import math\nimport torch\n\n\n# mtmc: x=f32[B,D] B=48 D=32\ndef f(x):\n    return {body}\n"
    capture = captured(text, "f")
    assert capture.variable_sizes == ("D",)
    assert capture.workload.assumed == (f"B is fixed at 48, because of line 7: `return {body}`",)


@pytest.mark.parametrize(("layers", "varies"), [(4, True), (80, False)])
def test_parameters_of_a_network_have_constant_sizes(captured, layers: int, varies: bool) -> None:
    """A symbol for each size makes the capture of a network take minutes. The batch varies in both."""
    text = (
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.scales = nn.ParameterList(torch.ones(6) for _ in range({layers}))\n"
        "    # mtmc: x=f32[B,D] B=4 D=6\n    def forward(self, x):\n        for scale in self.scales:\n            x = x * scale\n"
        "        return x\n"
    )
    shapes = [[str(size) for size in item.type.shape] for item in captured(text, "Net").graph.inputs]
    assert ["B", "D" if varies else "6"] in shapes
