"""The guard: for which arguments the Triton version holds; for all others the user's own body runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.graph import Graph, GraphInput, InputKind
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.micro.builtin.code import call_text
from mtmc_lsp.micro.builtin.naming import identifier


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
) -> str:
    """Source of the guard function.

    Args:
        name: of the function.
        parameters: of the function.
        graph: what the Triton version computes.
        names: Python for each graph input, in terms of ``parameters``.
        limits: further conditions over named sizes.
        aligned: graph inputs that must begin at a multiple of 16 bytes.
    """
    bound = bindings(graph, names)
    texts = {symbol: binding.text for symbol, binding in bound.items()}
    tensors = [names[item.name] for item in graph.inputs]
    # A tuple of one needs its comma.
    together = f"({tensors[0]},)" if len(tensors) == 1 else call_text("", tensors, "    ")
    values = _values(graph)
    # A module that was built otherwise may lack the others' tensors, so what it is comes before these are looked up.
    first = _structure(graph, [text for access, text in values if access.startswith("self.")])
    alike = _alike_inputs(graph) if _asks_together(graph) else None
    conditions = _common(graph, together=alike is not None)
    conditions.append("not torch.is_autocast_enabled()")
    conditions.append("not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))")
    conditions += _alike(alike or (), names)
    conditions += _shapes(graph, names, texts, alike)
    conditions += _apart(graph, names)
    conditions += [binding.condition for binding in bound.values() if binding.condition]
    conditions += [text for access, text in values if not access.startswith("self.")]
    conditions += [_substituted(text, texts) for text in (*graph.conditions, *limits)]
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
        f"{_looked_up_once(text, looked_up, parameters, _stores(graph) if many else {})}"
    )


WHETHER = "Whether the Triton version holds for these arguments; for any others the original code runs"
MANY_TENSORS = 8
"""Tensors of a module that are not looked up again for the launcher."""


def gives_tensors(graph: Graph) -> bool:
    """Whether the guard gives all tensors instead of only saying that it holds."""
    return sum(item.kind is not InputKind.ARGUMENT for item in graph.inputs) > MANY_TENSORS


PATH = re.compile(r"\bself(?:\.\w+|\[\d+\])+")
"""What is looked up in a module, and in what that gives."""


STORES = {InputKind.PARAMETER: "_parameters", InputKind.BUFFER: "_buffers"}
"""Where a module has its tensors, and finds them only after it has looked everywhere else: that takes ten times as long."""


def _stores(graph: Graph) -> dict[tuple[str, ...], str]:
    """The module's own dictionaries in which its parts and tensors are, by access."""
    found = {tuple(_parts(item.access)): "_modules" for item in graph.modules}
    return found | {tuple(_parts(item.access)): STORES[item.kind] for item in graph.inputs if item.kind in STORES}


def _looked_up_once(
    text: str, accesses: Sequence[str], parameters: Sequence[str], stores: Mapping[tuple[str, ...], str]
) -> str:
    """The statements with each module and tensor looked up once, where its name stands first.

    A module finds its parts and tensors in Python, which for a whole network takes as long as its kernels. Every first place is
    always reached: the statements are one chain of conditions, which ends the function where one does not hold.

    Args:
        text: statements that look things up from ``self`` on.
        accesses: what may have a name: modules and tensors, from ``self`` on.
        parameters: of the function that the statements are in.
        stores: the dictionaries to look in, where these are known; what is in none is ``None`` then.
    """
    # A part may be called as a function or a class is that the statements speak of: ``type``, ``all``, ``Block``.
    taken = {*parameters, *re.findall(r"(?<![\w.])[A-Za-z_]\w*", text)}
    known = {tuple(_parts(access)) for access in accesses if access.startswith("self.")}
    counts: dict[tuple[str, ...], int] = {}
    for match in PATH.finditer(text):
        for prefix in _prefixes(_parts(match.group())):
            counts[prefix] = counts.get(prefix, 0) + (prefix in known)
    names: dict[tuple[str, ...], str] = {}

    def named(path: list[str]) -> str:
        prefix = next((p for p in reversed(_prefixes(path)) if counts.get(p, 0) > 1), None)
        if prefix is None:
            return "".join(path)
        rest = "".join(path[len(prefix) :])
        if prefix in names:
            return names[prefix] + rest
        last = prefix[-1]
        if prefix in stores and last.startswith("."):
            last = f'.{stores[prefix]}.get("{last[1:]}")'
        inner = named([*prefix[:-1]]) + last
        name = identifier("_".join(re.findall(r"\w+", "".join(prefix[1:]))))
        while name in taken or name in names.values():
            name += "_"
        names[prefix] = name
        return f"({name} := {inner}){rest}"

    return PATH.sub(lambda match: named(_parts(match.group())), text)


def _parts(path: str) -> list[str]:
    """``self.a[0].b`` as ``self``, ``.a``, ``[0]``, ``.b``."""
    return re.findall(r"^self|\.\w+|\[\d+\]", path)


def _prefixes(path: Sequence[str]) -> list[tuple[str, ...]]:
    """Every path on the way to one, shortest first; ``self`` alone left out."""
    return [tuple(path[:end]) for end in range(2, len(path) + 1)]


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


PLAIN_CALL = "_is_plain_call"
OWN_MODULE = "_is_unchanged"
APART = "_lie_apart"
LIE_HERE = "_lie_here"
ALL_ARE = "_all_are"
ALL_HAVE = "_all_have"
ALIGNED = "_are_aligned"
GUARD_HELPERS = {
    ALIGNED: '''def _are_aligned(tensors) -> bool:
    """Whether tensors begin at multiples of 16 bytes, as hardware that moves whole tiles of them asks; a compiler cannot tell."""
    return not torch.compiler.is_compiling() and all(t.data_ptr() % 16 == 0 for t in tensors)
''',
    PLAIN_CALL: '''def _is_plain_call(tensors) -> bool:
    """Whether these are tensors with memory of their own, and no tracing, vmap or forward gradient follows the call."""
    kinds, strided = (torch.Tensor, torch.nn.Parameter), torch.strided
    for t in tensors:
        if type(t) not in kinds or t.layout is not strided or t.is_nested or t.is_neg():
            return False
    return (
        torch.autograd.forward_ad._current_level < 0
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
    )
''',
    APART: '''_APART = {}


def _lie_apart(tensors, changed) -> bool:
    """Whether no tensor's memory overlaps that of one of the first ``changed``, which are written into.

    Of a network's tensors it is the same at nearly every call, so what was found last is remembered.
    """
    key = (changed, *[(t.data_ptr(), t.nbytes if t.is_contiguous() else (t.shape, t.stride(), t.dtype)) for t in tensors])
    found = _APART.get(key)
    if found is None:
        found = True
        reached = written = 0  # the ends of all before, and of those among them that are written into
        for start, i in sorted([(t.data_ptr(), i) for i, t in enumerate(tensors)]):
            t = tensors[i]
            elements = t.numel() if t.is_contiguous() else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
            if start < (reached if i < changed else written):
                found = False
                break
            end = start + elements * t.itemsize
            reached = max(reached, end)
            if i < changed:
                written = max(written, end)
        if len(_APART) >= 16:
            _APART.clear()
        _APART[key] = found
    return found
''',
    OWN_MODULE: '''def _is_unchanged(module, kind, length=None) -> bool:
    """Whether calling the module runs its class's own forward alone: no other class, hook or patched method."""
    return (
        (type(module) is kind or f"{type(module).__module__}.{type(module).__qualname__}" == kind)
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
        and (length is None or len(module) == length)
    )
''',
    LIE_HERE: '''def _lie_here(tensors) -> bool:
    """Whether all are tensors that lie dense on the present GPU, where Triton launches."""
    for t in tensors:
        if not (isinstance(t, torch.Tensor) and t.is_cuda and t.is_contiguous()):
            return False
    here = torch.cuda.current_device()
    return all([t.get_device() == here for t in tensors])
''',
    ALL_ARE: '''def _all_are(dtype, shape, *tensors) -> bool:
    """Whether each tensor has this dtype and shape."""
    for t in tensors:
        if t.dtype != dtype or t.shape != shape:
            return False
    return True
''',
    ALL_HAVE: '''def _all_have(values, *modules) -> bool:
    """Whether attributes of each module have these values, of the same type; a tuple may stand for a list."""
    for module in modules:
        for name, value in values.items():
            own = getattr(module, name, module)  # which is no such value, where there is none
            if isinstance(value, list):
                if not isinstance(own, (list, tuple)) or [*own] != value:
                    return False
            elif type(own) is not type(value) or own != value:
                return False
    return True
''',
}
"""Functions that guards call, by name."""


def _structure(graph: Graph, values: list[str]) -> str:
    """Statements that return False (or None) for a module that is not made as the captured one was."""
    # Being called, the module itself has run its hooks already, and its own plain values say what it has.
    conditions = [f"type(self) is {item.kind}" for item in graph.modules if item.access == "self"]
    conditions += [text for text in values if re.search(r"\bself\.\w+( is |\) )", text)]
    for item in graph.modules:
        if item.access != "self":
            length = f", {item.length}" if item.length is not None else ""
            conditions.append(f"{OWN_MODULE}({item.access}, {item.kind}{length})")
    conditions += [f"{again} is {first}" for again, first in graph.same]
    conditions += values
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
    return _substituted(str(size), texts)


def _substituted(text: str, texts: dict[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda match: texts.get(match.group(), match.group()), text)
