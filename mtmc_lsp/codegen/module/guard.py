"""The guard: for which arguments the Triton version holds; for all others the user's own body runs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import call_text
from mtmc_lsp.codegen.module.guard_helpers import (
    ALIGNED,
    ALL_ARE,
    ALL_HAVE,
    APART,
    LIE_HERE,
    OWN_MODULE,
    PLAIN_CALL,
)
from mtmc_lsp.codegen.module.module_lookups import looked_up_once, parts
from mtmc_lsp.core.graph import Graph, GraphInput, InputKind
from mtmc_lsp.core.sizes import Size, rename_symbols


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


def write_guard(
    name: str,
    parameters: list[str],
    graph: Graph,
    names: dict[str, str],
    limits: tuple[str, ...],
    aligned: Sequence[str] = (),
    *,
    adds_in_no_order: bool = False,
    up_to_date: str = "",
) -> str:
    """Source of the guard function.

    Args:
        name: of the function.
        parameters: of the function.
        graph: what the Triton version computes.
        names: Python for each graph input, in terms of ``parameters``.
        limits: further conditions over named sizes.
        aligned: graph inputs that must begin at a multiple of 16 bytes.
        adds_in_no_order: whether the Triton version gives other last bits in each call.
        up_to_date: condition that the globals and functions of the target are unchanged; empty for none.
    """
    bound = bindings(graph, names)
    texts = {symbol: binding.text for symbol, binding in bound.items()}
    tensors = [names[item.name] for item in graph.inputs]
    # A tuple of one needs its comma.
    together = f"({tensors[0]},)" if len(tensors) == 1 else call_text("", tensors, "    ")
    values = _values(graph)
    # A module that was built otherwise may lack the others' tensors, so what it is comes before these are looked up.
    first = _structure(graph, [text for access, text in values if access.startswith("self.")], up_to_date)
    alike = _alike_inputs(graph) if _asks_together(graph) else None
    conditions = _common(graph, together=alike is not None)
    conditions.append("not torch.is_autocast_enabled()")
    conditions.append("not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))")
    conditions += _alike(alike or (), names)
    conditions += _shapes(graph, names, texts, alike)
    conditions += _unread(graph, texts)
    conditions += _apart(graph, names)
    conditions += [binding.condition for binding in bound.values() if binding.condition]
    conditions += [text for access, text in values if not access.startswith("self.")]
    conditions += [rename_symbols(text, texts) for text in (*graph.conditions, *limits)]
    if adds_in_no_order:
        # Who asks for warnings alone has code that may add in no order too. In words that torch.compile traces.
        warned = "torch.is_deterministic_algorithms_warn_only_enabled()"
        conditions.append(f"(not torch.are_deterministic_algorithms_enabled() or {warned})")
    if aligned:
        begin = ", ".join(names[name] for name in aligned)
        conditions.append(f"{ALIGNED}(({begin}{',' if len(aligned) == 1 else ''}))")
    unique = list(dict.fromkeys(conditions))
    body = "\n        and ".join(unique)
    many = gives_tensors(graph)
    result = f"(\n        {body}\n    )"
    text = f"{first}    tensors = {together}\n    return {f'tensors if {result} else None' if many else result}\n"
    looked_up = [item.access for item in graph.modules] + tensors
    what = "The launcher's arguments, or None where the original code must run" if many else WHETHER
    return (
        f"def {call_text(name, parameters)}{'' if many else ' -> bool'}:\n"
        f'    """{what}."""\n'
        f"{looked_up_once(text, looked_up, parameters, _stores(graph) if many else {})}"
    )


WHETHER = "Whether the Triton version holds for these arguments; for any others the original code runs"
MANY_TENSORS = 8
"""Tensors of a module that are not looked up again for the launcher."""


def gives_tensors(graph: Graph) -> bool:
    """Whether the guard gives all tensors instead of only saying that it holds."""
    return sum(item.kind is not InputKind.ARGUMENT for item in graph.inputs) > MANY_TENSORS


STORES = {InputKind.PARAMETER: "_parameters", InputKind.BUFFER: "_buffers"}
"""Where a module has its tensors, and finds them only after it has looked everywhere else: that takes ten times as long."""


def _stores(graph: Graph) -> dict[tuple[str, ...], str]:
    """The module's own dictionaries in which its parts and tensors are, by access."""
    found = {tuple(parts(item.access)): "_modules" for item in graph.modules}
    return found | {tuple(parts(item.access)): STORES[item.kind] for item in graph.inputs if item.kind in STORES}


def _common(graph: Graph, *, together: bool) -> list[str]:
    """What all tensors share: being on the GPU, and their dtype and layout where these agree; of many, asked ``together``."""
    # A kernel reads memory, which fake tensors, DTensors and the like do not have, and neither what traces a call (jit,
    # make_fx) nor what transforms it (vmap, forward gradients) sees a launch. Some of these raise when asked for more.
    # One pass over the tensors: the guard runs before every call.
    plain = f"(torch.compiler.is_compiling() or {PLAIN_CALL}(tensors))"
    if together:
        return [plain, f"{LIE_HERE}(tensors)"]
    checks = ["isinstance(t, torch.Tensor) and t.is_cuda"]
    if len(graph.inputs) > 1:
        checks.append("t.device == tensors[0].device")
    dtypes = {item.type.dtype for item in graph.inputs}
    if len(dtypes) == 1:
        checks.append(f"t.dtype == torch.{dtypes.pop()}")
    if all(item.type.is_contiguous for item in graph.inputs):
        checks.append("t.is_contiguous()")
    return [
        plain,
        f"all({' and '.join(checks)} for t in tensors)",
        # Triton launches on the present device.
        "tensors[0].get_device() == torch.cuda.current_device()",
    ]


def _apart(graph: Graph, names: dict[str, str]) -> list[str]:
    """What is written into must be no part of another argument: the kernels read all before they write."""
    changed = list(dict.fromkeys(names[mutation.input] for mutation in graph.mutations))
    others = [names[item.name] for item in graph.inputs if names[item.name] not in changed]
    if not changed or len(changed) + len(others) == 1:
        return []
    return [f"(torch.compiler.is_compiling() or {APART}(({', '.join([*changed, *others])}), {len(changed)}))"]


def _structure(graph: Graph, values: list[str], up_to_date: str) -> str:
    """Statements that return False (or None) for changed globals, or a module that is not made as the captured one was."""
    # Being called, the module itself has run its hooks already, and its own plain values say what it has.
    conditions = [f"type(self) is {item.kind}" for item in graph.modules if item.access == "self"]
    conditions += [text for text in values if re.search(r"\bself\.\w+( is |\) )", text)]
    for item in graph.modules:
        if item.access != "self":
            length = f", {item.length}" if item.length is not None else ""
            conditions.append(f"{OWN_MODULE}({item.access}, {item.kind}{length})")
    conditions += [f"{again} is {first}" for again, first in graph.aliases]
    conditions += values
    if up_to_date:
        conditions.insert(0, up_to_date)
    if not conditions:
        return ""
    unique = "\n        and ".join(dict.fromkeys(conditions))
    otherwise = "None" if gives_tensors(graph) else "False"
    return f"    if not (\n        {unique}\n    ):\n        return {otherwise}\n"


def _shapes(
    graph: Graph, names: dict[str, str], texts: dict[str, str], alike: Sequence[GraphInput] | None
) -> list[str]:
    """The dtypes, shapes and layouts that nothing else asks for; ``alike`` is ``None`` where all is asked of each by itself."""
    one_dtype = len({item.type.dtype for item in graph.inputs}) == 1
    all_dense = all(item.type.is_contiguous for item in graph.inputs)
    conditions: list[str] = []
    earlier: list[GraphInput] = []
    asked = {item.name for item in alike or ()}
    for item in graph.inputs:
        if item.name in asked:
            continue
        own = names[item.name]
        if not one_dtype or alike is not None:
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


def _unread(graph: Graph, texts: dict[str, str]) -> list[str]:
    """What the trace may rest on of tensors that the Triton version does not read: all that is no size of their own."""
    conditions = []
    for item in graph.unread_inputs:
        own, kind = item.access, item.type
        owner, _, name = own.rpartition(".")
        # Another module of the class may have none.
        held = f'getattr({owner}, "{name}", None)' if owner and name.isidentifier() else own
        conditions.append(f"isinstance({held}, torch.Tensor)")
        conditions.append(f"{own}.device == tensors[0].device")
        conditions.append(f"{own}.dtype == torch.{kind.dtype}")
        conditions.append(f"{own}.ndim == {len(kind.shape)}")
        for i, size in enumerate(kind.shape):
            if set(size.symbols()) <= graph.sizes.keys():
                conditions.append(f"{own}.shape[{i}] == {size_text(size, texts)}")
        if kind.is_contiguous:
            conditions.append(f"{own}.is_contiguous()")
    return conditions


def _alike(alike: Sequence[GraphInput], names: dict[str, str]) -> list[str]:
    """Of the many tensors of a network those of one dtype and shape are looked at together: it is shorter, and faster."""
    groups: dict[tuple[str, tuple[Size, ...]], list[str]] = {}
    for item in alike:
        groups.setdefault((item.type.dtype, item.type.shape), []).append(names[item.name])
    return [
        call_text(ALL_ARE, [f"torch.{dtype}", _constant_shape(shape), *tensors], "        ")
        for (dtype, shape), tensors in groups.items()
    ]


def _asks_together(graph: Graph) -> bool:
    """Whether the guard asks of many tensors at once: those of a network, all of them dense."""
    return gives_tensors(graph) and all(item.type.is_contiguous for item in graph.inputs)


def _alike_inputs(graph: Graph) -> list[GraphInput]:
    """The parameters and buffers whose shapes are fixed, and hold something."""
    held = (item for item in graph.inputs if item.kind is not InputKind.ARGUMENT)
    return [item for item in held if all(size.is_constant and size.constant for size in item.type.shape)]


def _constant_shape(shape: Sequence[Size]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _without_repeated_numel(conditions: list[str]) -> list[str]:
    """One non-emptiness check per shape is enough: equal shapes are equally empty."""
    same = {text.split(".shape == ")[0] for text in conditions if re.fullmatch(r"[\w.]+\.shape == [\w.]+\.shape", text)}
    return [text for text in conditions if not (text.endswith(".numel() > 0") and text.split(".numel")[0] in same)]


def _shape(item: GraphInput, own: str, texts: dict[str, str]) -> list[str]:
    rank = len(item.type.shape)
    if rank and all(size.is_constant for size in item.type.shape):
        return [f"{own}.shape == {_constant_shape(item.type.shape)}"]
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


def _values(graph: Graph) -> list[tuple[str, str]]:
    """For each Python value that the graph was built with, its access and the condition that it is the same.

    Of the same type too: 2 and 2.0 promote tensors differently, and a tensor may be given where a number was.
    """
    result = []
    alike: set[str] = set()
    for owners, names in _values_alike(graph).items():
        held = {name: graph.constants[f"{owners[0]}.{name}"] for name in names}
        result.append((f"{owners[0]}.{names[0]}", call_text(ALL_HAVE, [repr(held), *owners], "        ")))
        alike |= {f"{owner}.{name}" for owner in owners for name in names}
    for access, value in graph.constants.items():
        if access in alike:
            continue
        if isinstance(value, dict):
            # What ``*args`` or ``**kwargs`` take: the graph is that of a call without any.
            text = f"not {access}"
        elif value is None or isinstance(value, bool):
            text = f"{access} is {value}"
        elif isinstance(value, list):
            text = f"isinstance({access}, (list, tuple)) and [*{access}] == {value!r}"
        elif isinstance(value, float) and not math.isfinite(value):
            # Only NaN differs from itself.
            same = f"{access} != {access}" if math.isnan(value) else f'{access} == float("{value}")'
            text = f"type({access}) is float and {same}"
        elif isinstance(value, str):
            text = f"{access} == {value!r}"
        else:
            text = f"type({access}) is {type(value).__name__} and {access} == {value!r}"
        result.append((access, text))
    return result


FEW_ALIKE = 3
"""Modules from which on what they have alike is asked of all of them together."""


def _values_alike(graph: Graph) -> dict[tuple[str, ...], list[str]]:
    """The modules of a network that have values alike, and the names of these, where they are several modules."""
    owners: dict[tuple[str, str], list[str]] = {}
    for access, value in graph.constants.items() if gives_tensors(graph) else ():
        owner, _, name = access.rpartition(".")
        special = isinstance(value, float) and not math.isfinite(value)
        if owner.startswith("self.") and name.isidentifier() and not special:
            owners.setdefault((name, repr(value)), []).append(owner)
    found: dict[tuple[str, ...], list[str]] = {}
    for (name, _), them in owners.items():
        if len(them) >= FEW_ALIKE:
            found.setdefault(tuple(them), []).append(name)
    return found


def size_text(size: Size, texts: dict[str, str]) -> str:
    """A size as Python, each named size read from the arguments."""
    return rename_symbols(str(size), texts)
