"""The conditions of a guard for dtypes, shapes and layouts of tensors."""

from __future__ import annotations

from collections.abc import Container, Sequence

from mtmc_lsp.codegen.kernel.snippets import call_text, joined
from mtmc_lsp.codegen.module.guard_helpers import HAVE_TYPE_AND_SHAPE
from mtmc_lsp.core.graph import Graph, GraphInput
from mtmc_lsp.core.sizes import Size, conditions_hold, names_in, rename_symbols
from mtmc_lsp.source.line_wrapping import MAX_LINE

LEAST_TENSORS_TOGETHER = 3
"""Minimum number of tensors for which one condition checks dtype and layout."""
DTYPE, CONTIGUOUS = "t.dtype == torch.{}", "t.is_contiguous()"
CONTINUED = f"{'':16}and "
"""The start of a line with a further condition of the tensors."""


def shapes(
    graph: Graph,
    names: dict[str, str],
    texts: dict[str, str],
    exact: Container[str],
    checked_as_group: Sequence[GraphInput] | None,
) -> list[str]:
    """Checks of dtypes, shapes and layouts that no other condition covers; ``checked_as_group`` may be ``None``."""
    conditions: list[str] = []
    earlier: list[GraphInput] = []
    positive: set[Size] = set()
    """Sizes that earlier conditions show not to be 0."""
    checked_together = {item.name for item in checked_as_group or ()}
    of_all = _of_all(graph) if checked_as_group is None else []
    if of_all:
        conditions.append(f"all([{' and '.join(of_all)} for t in tensors])")
    for item in graph.inputs:
        if item.name in checked_together:
            continue
        access = names[item.name]
        of_tensor = [] if DTYPE.format(item.type.dtype) in of_all else [f"{access}.dtype == torch.{item.type.dtype}"]
        same = next((other for other in earlier if other.type.shape == item.type.shape), None)
        if same is not None:
            of_tensor.append(f"{access}.shape == {names[same.name]}.shape")
        else:
            of_tensor += _shape(item, access, texts, exact)
        of_tensor += [] if CONTIGUOUS in of_all else _layout(item, access, texts, graph.conditions)
        if not all(size in positive or (size.is_constant and size.constant) for size in item.type.shape):
            of_tensor.append(f"{access}.numel() > 0")
        conditions += joined(of_tensor, " and ", MAX_LINE - len(CONTINUED))
        positive |= set(item.type.shape)
        earlier.append(item)
    return conditions


def _of_all(graph: Graph) -> list[str]:
    """What is checked of all tensors ``t`` in one condition, because it is the same for several."""
    if len(graph.inputs) < LEAST_TENSORS_TOGETHER:
        return []
    dtypes = {item.type.dtype for item in graph.inputs}
    is_contiguous = all(item.type.is_contiguous for item in graph.inputs)
    return [*(map(DTYPE.format, dtypes) if len(dtypes) == 1 else ()), *([CONTIGUOUS] if is_contiguous else [])]


def group_checks(group_inputs: Sequence[GraphInput], names: dict[str, str]) -> list[str]:
    """Group checks: tensors with the same dtype and shape are checked by one helper call, which is shorter and faster."""
    groups: dict[tuple[str, tuple[Size, ...]], list[str]] = {}
    for item in group_inputs:
        groups.setdefault((item.type.dtype, item.type.shape), []).append(names[item.name])
    return [
        call_text(HAVE_TYPE_AND_SHAPE, [f"torch.{dtype}", _constant_shape(shape), *tensors], "        ")
        for (dtype, shape), tensors in groups.items()
    ]


def _constant_shape(shape: Sequence[Size]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _shape(item: GraphInput, access: str, texts: dict[str, str], exact: Container[str]) -> list[str]:
    rank = len(item.type.shape)
    if rank and all(size.is_constant for size in item.type.shape):
        return [f"{access}.shape == {_constant_shape(item.type.shape)}"]
    result = [f"{access}.ndim == {rank}"]
    for i, size in enumerate(item.type.shape):
        text = size_text(size, texts)
        if text != f"{access}.shape[{i}]" and f"{access}.shape[{i}]" not in exact:
            result.append(f"{access}.shape[{i}] == {text}")
    return result


def _layout(item: GraphInput, access: str, texts: dict[str, str], size_conditions: Sequence[str]) -> list[str]:
    if item.type.is_contiguous:
        return [f"{access}.is_contiguous()"]
    conditions = []
    for i, (size, stride) in enumerate(zip(item.type.shape, item.type.stride, strict=True)):
        text = size_text(stride, texts)
        # A dimension of size 1 is never stepped along: torch leaves its stride open, for example in a batch of one.
        if text == f"{access}.stride({i})" or (size.is_constant and size.constant == 1):
            continue
        condition = f"{access}.stride({i}) == {text}"
        conditions.append(
            f"({access}.shape[{i}] == 1 or {condition})" if _may_be_one(size, size_conditions) else condition
        )
    return conditions


def _may_be_one(size: Size, size_conditions: Sequence[str]) -> bool:
    """Whether the conditions of the graph allow this size to be 1; for an expression of sizes, whether it may vary."""
    if not size.is_symbol:
        return not size.is_constant
    name = str(size)
    return conditions_hold([text for text in size_conditions if names_in(text) == {name}], {name: 1})


def size_text(size: Size, texts: dict[str, str]) -> str:
    """A size as Python, with named sizes replaced by ``texts``."""
    return rename_symbols(str(size), texts)
