"""Large graphs are decomposed node by node into what torch decomposes them into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sympy import sympify
from torch.export import Dim, export

from mtmc_lsp.capture.worker.passes.decompositions import decompositions
from mtmc_lsp.capture.worker.passes.non_polynomial_sizes import simplified_stride
from mtmc_lsp.capture.worker.speedups import repeated_nodes
from mtmc_lsp.capture.worker.speedups.repeated_nodes import decomposed

Function = Callable[..., Any]


def _program(function: Function, *tensors: torch.Tensor, varies: bool = False) -> Any:
    class Target(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
        def forward(self, *given: torch.Tensor) -> Any:
            return function(*given)

    shapes = tuple({0: Dim.AUTO} if varies and each.shape == tensors[0].shape else {} for each in tensors)
    with torch.no_grad():
        return export(Target(), tensors, dynamic_shapes=(shapes,), strict=False)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _operations(program: Any) -> list[tuple[str, tuple[str, ...], str]]:
    """The operations that the results need, with the positions of their operands, and the types of their results."""
    positions: dict[Any, str] = {}
    found = []
    needed, pending = set(), [program.graph.output_node()]
    while pending:
        node = pending.pop()
        needed.add(node)
        pending += [each for each in node.all_input_nodes if isinstance(each.meta["val"], (torch.Tensor, tuple, list))]

    def text(argument: Any) -> str:
        value = argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument
        if isinstance(argument, torch.fx.Node) and not isinstance(value, torch.SymInt):
            return positions[argument]
        return f"[{','.join(map(text, value))}]" if isinstance(value, (list, tuple)) else str(value)

    for node in program.graph.nodes:
        if node in needed and node.op == "call_function":
            value = node.meta["val"]
            strides = [simplified_stride(sympify(str(step))) for step in value.stride()] if _is_tensor(value) else []
            kind = f"{value.dtype} {list(value.shape)} {strides}" if _is_tensor(value) else ""
            found.append((str(node.target), tuple(map(text, node.args)), kind))
        positions[node] = str(len(found)) if node.op != "placeholder" else node.name
    return found


@pytest.fixture(autouse=True)
def every_graph_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small graphs show the same."""
    monkeypatch.setattr(repeated_nodes, "LEAST_OPERATIONS", 0)


def _blocks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Blocks with writes in place, a dropout of inference, a merged view and parts of a product."""
    for _ in range(3):
        hidden = F.relu_(F.linear(x, weight))
        hidden += x
        first, second = F.dropout(hidden, training=False).chunk(2, -1)
        x = torch.cat([first * torch.sigmoid(second), second], -1)
        x = F.layer_norm(x.reshape(-1, x.shape[-1]), x.shape[-1:]).reshape(hidden.shape)
    return F.cross_entropy(x.flatten(0, 1), x.argmax(-1).flatten())


def _normalised(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = F.silu(F.batch_norm(x, mean, variance), inplace=True)
    return x


def _with_equal_operands(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The first sum has one tensor twice, and the others do not."""
    return (x + x) * (x + y) * (y + x) * torch.dist(x, y)


def _attention(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        q, k, v = x.view(x.shape[0], 6, 4, 2).permute(2, 0, 1, 3)[:3]
        x = F.scaled_dot_product_attention(q, k, v).repeat(1, 1, 4).to(torch.bfloat16).to(torch.float32).contiguous()
    return x


CASES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "blocks": (_blocks, [(4, 6, 8), (8, 8)]),
    "batch norms": (_normalised, [(4, 6, 8), (6,), (6,)]),
    "equal operands": (_with_equal_operands, [(4, 6), (4, 6)]),
    "attention": (_attention, [(4, 6, 8)]),
}


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_graph_is_decomposed_as_by_torch(name: str, varies: bool) -> None:
    """Operations, operands and types of results are the same, also where sizes vary."""
    function, shapes = CASES[name]
    program = _program(function, *map(torch.rand, shapes), varies=varies)
    ours = decomposed(program, decompositions())
    assert ours is not None
    assert _operations(ours) == _operations(program.run_decompositions(decompositions()))


@pytest.mark.parametrize("name", CASES)
def test_the_new_graph_computes_the_same(name: str) -> None:
    """The graph runs, and its results are those of the code."""
    function, shapes = CASES[name]
    tensors = [torch.rand(shape) for shape in shapes]
    ours = decomposed(_program(function, *tensors), decompositions())
    assert ours is not None
    ours.graph.lint()
    (result,) = torch.fx.GraphModule(torch.nn.Module(), ours.graph)(*(tensor.clone() for tensor in tensors))
    torch.testing.assert_close(result, function(*tensors))


def _through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[0].mul_(3)
    return y


def _into_an_input(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def _two_views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    return y, y[0]


@pytest.mark.parametrize("function", [_through_a_view, _into_an_input, _two_views, lambda x: (x * 2, x.t())])
def test_torch_decomposes_what_depends_on_other_nodes(function: Function) -> None:
    """Writes that other nodes see, and results that share memory, are left to torch."""
    assert decomposed(_program(function, torch.rand(4, 6)), decompositions()) is None


def test_a_small_graph_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of nodes in small graphs stay as they are."""
    monkeypatch.setattr(repeated_nodes, "LEAST_OPERATIONS", 50)
    assert decomposed(_program(lambda x: x.sin(), torch.rand(4)), decompositions()) is None
