"""An export ends at the first size that must be constant, and is made again with fewer free ones: networks are captured sooner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtmc_lsp.capture import exporting, reading
from mtmc_lsp.capture.exporting import export_graph
from mtmc_lsp.capture.reading import InputTensor
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Target, TargetKind

TARGET = Target(__file__, "f", TargetKind.FUNCTION, 1, 1)
FORMS = {
    "strided": (lambda x, w: torch.relu(torch.nn.functional.conv2d(x, w, stride=2)), True),
    "pooled": (lambda x, w: torch.nn.functional.max_pool2d(torch.nn.functional.conv2d(x, w), 2) * 2, True),
    "neither": (lambda x, w: torch.relu(x).sum(-1, keepdim=True) * x, False),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_divisions_speak_of_is_constant_after_one_whole_export(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, is_constant = FORMS[name]
    read: list[Any] = []

    class Reader(reading.Reader):
        def __init__(self, program: Any, *more: Any) -> None:
            super().__init__(program, *more)
            read.append(program)

    monkeypatch.setattr(exporting, "Reader", Reader)
    inputs = [
        InputTensor("x", "x", InputKind.ARGUMENT, torch.rand(5, 3, 20, 24)),
        InputTensor("w", "self.w", InputKind.PARAMETER, torch.rand(7, 3, 3, 3)),
    ]
    graph, notes = export_graph(function, inputs, TARGET, {}, repr, [])
    assert len(read) == 2, "one program, and what it is expanded to"
    assert not notes
    assert [size.is_constant for size in graph.inputs[0].type.shape[2:]] == [is_constant] * 2
    batch = graph.inputs[0].type.shape[0]
    assert not batch.is_constant and batch.value(graph.sizes) == 5


def test_an_error_of_the_users_is_told_as_before() -> None:
    inputs = [InputTensor("x", "x", InputKind.ARGUMENT, torch.rand(4, 6))]
    with pytest.raises(exporting.TargetUnsupported):
        export_graph(lambda x: x if x.sum() > 0 else -x, inputs, TARGET, {}, repr, [])


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("x.view(x.shape[0], x.shape[1] // 4, 4) * 2", "T is fixed at 32, because of line 4: `y = {}`"),
        ("x.unfold(1, 8, 4).sum(-1)", "T is fixed at 32, because of line 4: `y = {}`"),
        ("x[:, 1:] - x[:, :-1]", ""),
        ("x.view(-1, 8) if x.shape[1] == 32 else x * 2", "T is fixed at 32, because torch's trace holds for it alone"),
    ],
)
def test_a_named_size_that_becomes_a_constant_is_told_with_the_line_that_asks_for_it(
    captured, body: str, note: str
) -> None:
    text = f"import torch\n# mtmc: x=f32[B,T] B=4 T=32\ndef f(x):\n    y = {body}\n    return y.softmax(-1)\n"
    assumed = captured(text, "f").workload.assumed
    assert assumed == ((note.format(body),) if note else ())
