"""Calls of a generated launcher on tensors without data, which show the kernels that it launches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mtmc_lsp.compile.messages import LauncherCalls, TensorLayout
from mtmc_lsp.core.graph import Graph, TensorType
from mtmc_lsp.core.run import GeneratedCode


def launcher_calls(graph: Graph, code: GeneratedCode, sizes: Sequence[Mapping[str, int]]) -> LauncherCalls | None:
    """Calls of the generated launcher, one for each set of sizes; ``None`` if the code has no launcher."""
    launcher = re.search(r"^def (\w+_launch)\(", code.block, re.MULTILINE)
    if launcher is None:
        return None

    def layout(kind: TensorType, values: Mapping[str, int]) -> TensorLayout:
        shape, stride = (tuple(size.value(values) for size in sizes) for sizes in (kind.shape, kind.stride))
        return TensorLayout(shape, stride, kind.dtype)

    trained = graph.backward.gradients if graph.backward is not None else ()
    numbers = tuple(number for number, item in enumerate(graph.inputs) if item.name in trained)
    calls = tuple(tuple(layout(item.type, values) for item in graph.inputs) for values in sizes)
    return LauncherCalls(launcher[1], calls, numbers)
