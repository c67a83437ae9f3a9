"""The guard: for which arguments the Triton version holds; for all others the user's own body runs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mtmc_lsp.core.graph import Graph, GraphInput
from mtmc_lsp.core.sizes import Size


@dataclass(frozen=True)
class Binding:
    """Where a named size is read from at run time."""

    symbol: str
    text: str
    """Python: ``x.shape[0]``."""
    condition: str = ""
    """What must hold for that reading to be exact: ``x.shape[0] % 2 == 0``."""


def bindings(graph: Graph, names: dict[str, str]) -> dict[str, Binding]:
    """A reading of every named size from the inputs' shapes and strides.

    Args:
        graph: the graph.
        names: Python for each graph input.
    """
    found: dict[str, Binding] = {}
    dims = [(names[item.name], "shape", i, size) for item in graph.inputs for i, size in enumerate(item.type.shape)]
    dims += [(names[item.name], "stride", i, size) for item in graph.inputs for i, size in enumerate(item.type.stride)]
    for plain in (True, False):
        for name, what, i, size in dims:
            text = f"{name}.shape[{i}]" if what == "shape" else f"{name}.stride({i})"
            if plain and size.is_symbol:
                found.setdefault(str(size), Binding(str(size), text))
            elif not plain and len(size.terms) == 1 and len(size.terms[0][0]) == 1:
                symbol, factor = size.terms[0][0][0], size.terms[0][1]
                if symbol.isidentifier() and symbol not in found:
                    found[symbol] = Binding(symbol, f"{text} // {factor}", f"{text} % {factor} == 0")
    return found


def write_guard(name: str, parameters: list[str], graph: Graph, names: dict[str, str], limits: tuple[str, ...]) -> str:
    """Source of the guard function.

    Args:
        name: of the function.
        parameters: of the function.
        graph: what the Triton version computes.
        names: Python for each graph input, in terms of ``parameters``.
        limits: further conditions over named sizes.
    """
    bound = bindings(graph, names)
    texts = {symbol: binding.text for symbol, binding in bound.items()}
    tensors = ", ".join(names[item.name] for item in graph.inputs)
    comma = "," if len(graph.inputs) == 1 else ""
    conditions = _common(graph)
    conditions.append("not torch.is_autocast_enabled()")
    conditions.append("not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))")
    conditions += _shapes(graph, names, texts)
    conditions += [binding.condition for binding in bound.values() if binding.condition]
    conditions += _values(graph)
    conditions += [_substituted(text, texts) for text in (*graph.conditions, *limits)]
    unique = list(dict.fromkeys(conditions))
    body = "\n        and ".join(unique)
    return (
        f"def {name}({', '.join(parameters)}) -> bool:\n"
        f'    """Whether the Triton version holds for these arguments; for any others the original code runs."""\n'
        f"    tensors = ({tensors}{comma})\n"
        f"    return (\n        {body}\n    )\n"
    )


def _common(graph: Graph) -> list[str]:
    """What all tensors share: being on the GPU, and their dtype and layout where these agree."""
    checks = ["isinstance(t, torch.Tensor)", "t.is_cuda"]
    dtypes = {item.type.dtype for item in graph.inputs}
    if len(dtypes) == 1:
        checks.append(f"t.dtype == torch.{dtypes.pop()}")
    if all(item.type.is_contiguous for item in graph.inputs):
        checks.append("t.is_contiguous()")
    result = [f"all({' and '.join(checks)} for t in tensors)"]
    if len(graph.inputs) > 1:
        result.append("all(t.device == tensors[0].device for t in tensors)")
    # Triton launches on the present device.
    result.append("tensors[0].get_device() == torch.cuda.current_device()")
    # A kernel reads memory, which fake tensors, DTensors and the like do not have.
    result.append(
        "(torch.compiler.is_compiling() or all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors))"
    )
    return result


def _shapes(graph: Graph, names: dict[str, str], texts: dict[str, str]) -> list[str]:
    one_dtype = len({item.type.dtype for item in graph.inputs}) == 1
    all_dense = all(item.type.is_contiguous for item in graph.inputs)
    conditions: list[str] = []
    earlier: list[GraphInput] = []
    for item in graph.inputs:
        own = names[item.name]
        if not one_dtype:
            conditions.append(f"{own}.dtype == torch.{item.type.dtype}")
        same = next((other for other in earlier if other.type.shape == item.type.shape), None)
        if same is not None:
            conditions.append(f"{own}.shape == {names[same.name]}.shape")
        else:
            conditions += _shape(item, own, texts)
        if not all_dense:
            conditions += _layout(item, own, texts)
        if any(not size.is_constant or size.constant == 0 for size in item.type.shape):
            conditions.append(f"{own}.numel() > 0")
        earlier.append(item)
    return _without_repeated_numel(conditions)


def _without_repeated_numel(conditions: list[str]) -> list[str]:
    """One non-emptiness check per shape is enough: equal shapes are equally empty."""
    same = {text.split(".shape == ")[0] for text in conditions if re.fullmatch(r"[\w.]+\.shape == [\w.]+\.shape", text)}
    return [text for text in conditions if not (text.endswith(".numel() > 0") and text.split(".numel")[0] in same)]


def _shape(item: GraphInput, own: str, texts: dict[str, str]) -> list[str]:
    rank = len(item.type.shape)
    if rank and all(size.is_constant for size in item.type.shape):
        return [f"{own}.shape == ({', '.join(str(size) for size in item.type.shape)}{',' if rank == 1 else ''})"]
    result = [f"{own}.ndim == {rank}"]
    for i, size in enumerate(item.type.shape):
        text = size_text(size, texts)
        if text != f"{own}.shape[{i}]":
            result.append(f"{own}.shape[{i}] == {text}")
    return result


def _layout(item: GraphInput, own: str, texts: dict[str, str]) -> list[str]:
    if item.type.is_contiguous:
        return [f"{own}.is_contiguous()"]
    return [
        f"{own}.stride({i}) == {text}"
        for i, size in enumerate(item.type.stride)
        if (text := size_text(size, texts)) != f"{own}.stride({i})"
    ]


def _values(graph: Graph) -> list[str]:
    result = []
    for access, value in graph.constants.items():
        if value is None or isinstance(value, bool):
            result.append(f"{access} is {value}")
        elif isinstance(value, list):
            result.append(f"tuple({access}) == {tuple(value)!r}")
        else:
            result.append(f"{access} == {value!r}")
    return result


def size_text(size: Size, texts: dict[str, str]) -> str:
    """A size as Python, each named size read from the arguments."""
    return _substituted(str(size), texts)


def _substituted(text: str, texts: dict[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda match: texts.get(match.group(), match.group()), text)
