"""The guard: decides at run time whether the Triton version supports the arguments. If not, the original body runs."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mtmc_lsp.capture.accesses import is_indexed, is_of_module, owner_of, quoted, steps
from mtmc_lsp.codegen.kernel.snippets import LINE, call_text
from mtmc_lsp.codegen.module.attribute_inputs import attribute_conditions, may_be_elsewhere, tensor_text
from mtmc_lsp.codegen.module.conditions.tensors import CONTINUED, group_checks, shapes, size_text
from mtmc_lsp.codegen.module.guard_helpers import (
    ACCEPT,
    ALIGNED,
    ARE_ACCEPTED,
    HAS_CLASS,
    HAS_ITEMS,
    HAVE_VALUES,
    NO_OVERLAP,
    PLAIN_CALL,
    REPORTED,
    TF32_HELPERS,
)
from mtmc_lsp.codegen.module.module_lookups import (
    LEAST_MODULES_IN_GROUP,
    cache_lookups,
    has_items,
    module_lists,
    parts,
    unchanged_modules,
)
from mtmc_lsp.codegen.module.number_conditions import number_conditions
from mtmc_lsp.codegen.module.unpacking import Unpacking
from mtmc_lsp.core.graph import Graph, GraphInput, InputKind
from mtmc_lsp.core.sizes import Size, names_in, rename_symbols
from mtmc_lsp.core.workload import is_torch_name


@dataclass(frozen=True)
class Binding:
    """How to read a named size at run time."""

    symbol: str
    text: str
    """Python expression, such as ``x.shape[0]``."""
    condition: str = ""
    """Condition for the expression to be exact, such as ``x.shape[0] % 2 == 0``; empty if none."""
    exact: str = ""
    """The shape or stride that the condition covers: ``x.shape[0]``; empty if there is no condition."""

    @property
    def operand(self) -> str:
        """The expression as an operand of a larger one."""
        return f"({self.text})" if " " in self.text else self.text


def bindings(graph: Graph, names: dict[str, str]) -> dict[str, Binding]:
    """Find an expression for every named size from the inputs' shapes and strides.

    Args:
        names: Python for each graph input.
    """
    result: dict[str, Binding] = {}
    dims = [(names[item.name], "shape", i, size) for item in graph.inputs for i, size in enumerate(item.type.shape)]
    dims += [(names[item.name], "stride", i, size) for item in graph.inputs for i, size in enumerate(item.type.stride)]
    for plain in (True, False):
        for name, kind, i, size in dims:
            text = f"{name}.shape[{i}]" if kind == "shape" else f"{name}.stride({i})"
            if plain and size.is_symbol:
                result.setdefault(str(size), Binding(str(size), text))
            elif not plain and (units := _in_units(size)) is not None and units[0] not in result:
                symbol, unit, rest = units
                # Named sizes are at least 1; without a rest, an input that is not empty shows that.
                at_least_one = f" and {text} >= {unit}" if rest else ""
                result[symbol] = Binding(symbol, f"{text} // {unit}", f"{text} % {unit} == {rest}{at_least_one}", text)
    return result


def _in_units(size: Size) -> tuple[str, int, int] | None:
    """Symbol, unit and rest of a size ``unit * symbol + rest`` with a rest below the unit."""
    terms = [term for term in size.terms if term[0]]
    rest = sum(coefficient for factors, coefficient in size.terms if not factors)
    if len(terms) != 1 or len(terms[0][0]) != 1 or not terms[0][0][0].isidentifier() or not 0 <= rest < terms[0][1]:
        return None
    return terms[0][0][0], terms[0][1], rest


class Traced(enum.Enum):
    """Which calls to a target with a backward pass torch.compile may trace."""

    NEVER = enum.auto()
    WITH_GRADIENTS = enum.auto()
    ALWAYS = enum.auto()


def write_guard(
    name: str,
    parameters: list[str],
    graph: Graph,
    names: dict[str, str],
    limits: tuple[str, ...],
    aligned: Sequence[str] = (),
    *,
    uses_atomics: bool = False,
    tf32: Sequence[str] = (),
    up_to_date: str = "",
    unpacked: Unpacking | None = None,
    trained: Collection[str] | None = None,
    traced: Traced = Traced.NEVER,
) -> str:
    """Source of the guard function.

    Args:
        names: Python for each graph input, in terms of ``parameters``.
        tf32: the libraries, as in :attr:`Graph.tf32_libraries`, whose products kernels compute with the precision of TF32.
        unpacked: how to read the tensors inside containers among the arguments.
        limits: further conditions over named sizes.
        aligned: graph inputs whose addresses must be multiples of 16 bytes.
        uses_atomics: whether the Triton version is non-deterministic because it uses atomic additions.
        trained: graph inputs whose gradients the Triton version computes; None if it records none.
        traced: which of these calls torch.compile may trace.
        up_to_date: condition that the target's globals and functions are unchanged; empty to skip the check.
    """
    size_bindings = bindings(graph, names)
    texts = {symbol: binding.operand for symbol, binding in size_bindings.items()}
    exact = {binding.exact for binding in size_bindings.values()}
    tensors = [tensor_text(graph, item, names) for item in graph.inputs]
    values = _values(graph)
    # Check the module structure first: a different structure may lack the tensors that are read below.
    module_values = [text for access, text in values if is_of_module(access)]
    unpacked = unpacked or Unpacking()
    attributes = attribute_conditions(graph, names)
    structure = _structure(
        graph, [*unpacked.conditions, *attributes], module_values, up_to_date, is_trained=trained is not None
    )
    structure_checks = ""
    if structure != [up_to_date] or not set(tensors) <= set(parameters):
        structure_checks = _returning_early(structure, graph)
        structure_checks += "".join(f"    {line}\n" for line in unpacked.statements)
        structure = []
    group_inputs = _group_inputs(graph) if _uses_group_checks(graph) else None
    # Some classes of tensors raise in further conditions, so this one comes first.
    of_tensors = [f"{PLAIN_CALL}(tensors)"]
    of_tensors += group_checks(group_inputs or (), names)
    of_tensors += shapes(graph, names, texts, exact, group_inputs)
    of_tensors += [binding.condition for binding in size_bindings.values() if binding.condition]
    of_sizes = [*graph.conditions, *limits]
    of_tensors += [rename_symbols(text, texts) for text in of_sizes if names_in(text) <= texts.keys()]
    conditions = _autocast_conditions(graph)
    conditions += [f"{TF32_HELPERS[library]}()" for library in tf32]
    conditions += _gradient_conditions(graph, tensors, trained, traced)
    conditions += _inspected_only(graph, texts)
    conditions += _no_overlap(graph, names)
    conditions += [text for access, text in values if not is_of_module(access)]
    conditions += [f"isinstance({access}, bool)" for access in graph.free_flags]
    conditions += number_conditions(graph)
    conditions += [rename_symbols(text, texts) for text in of_sizes if not names_in(text) <= texts.keys()]
    if uses_atomics:
        # Code that only requests warnings may use non-deterministic operations. torch.compile can trace this form.
        warns_only = "torch.is_deterministic_algorithms_warn_only_enabled()"
        conditions.append(f"(not torch.are_deterministic_algorithms_enabled() or {warns_only})")
    if aligned:
        aligned_tensors = ", ".join(names[name] for name in aligned)
        conditions.append(f"{ALIGNED}(({aligned_tensors}{',' if len(aligned) == 1 else ''}))")
    of_call = dict.fromkeys([*structure, _of_tensors(name, of_tensors), *conditions])
    result = "(\n        {}\n    )".format("\n        and ".join(of_call))
    as_tuple = returns_tensors(graph)
    returned = f"tensors if {result} else None" if as_tuple else result
    text = f"{structure_checks}    tensors = {SEPARATOR.join(tensors)}\n    return {returned}\n"
    accesses = [item.access for item in graph.modules] + [names[item.name] for item in graph.inputs]
    summary = "The launcher's arguments, or None if the original code must run" if as_tuple else GUARD_SUMMARY
    text = cache_lookups(text, accesses, parameters, _stores(graph) if as_tuple else {})
    return (
        f"@{REPORTED}\ndef {call_text(name, parameters)}{'' if as_tuple else ' -> bool'}:\n"
        f'    """{summary}."""\n'
        f"{_with_tuple(text)}"
    )


def _with_tuple(text: str) -> str:
    """The statements of a guard with the tuple of its tensors."""
    found = re.search(r"^    tensors = (.*)$", text, re.MULTILINE)
    assert found is not None
    items = found[1].split(SEPARATOR)
    # A tuple of one needs its comma.
    value = f"({items[0]},)" if len(items) == 1 else call_text("", items, "    ")
    return text.replace(found[0], f"    tensors = {value}")


def _of_tensors(guard: str, conditions: Sequence[str]) -> str:
    """The condition that checks the tensors, in one step if they are like those of an accepted call."""
    key = f'("{guard}", tensors)'
    checked = f"\n{CONTINUED}".join([*dict.fromkeys(conditions), f"{ACCEPT}{key}"])
    return f"(\n            {ARE_ACCEPTED}{key}\n            or (\n                {checked}\n            )\n        )"


def _autocast_conditions(graph: Graph) -> list[str]:
    """The caller's autocast is that of the workload."""
    if not graph.autocast:
        return ["not torch.is_autocast_enabled()"]
    return ["torch.is_autocast_enabled()", f'torch.get_autocast_dtype("cuda") == torch.{graph.autocast}']


def _gradient_conditions(
    graph: Graph, tensors: Sequence[str], trained: Collection[str] | None, traced: Traced
) -> list[str]:
    """Autograd may need no gradient that the Triton version does not compute."""
    if trained is None:
        return ["not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors]))"]
    texts = {item.name: text for item, text in zip(graph.inputs, tensors, strict=True)}
    floats = [texts[item.name] for item in graph.inputs if item.name not in trained and "float" in item.type.dtype]
    needed = _recorded([texts[name] for name in texts if name in trained])
    compiled = {
        Traced.NEVER: [COMPILED],
        Traced.WITH_GRADIENTS: [f"({COMPILED} or {needed})"],
        Traced.ALWAYS: [],
    }
    return [*compiled[traced], *([f"not ({_recorded(floats)})"] if floats else [])]


def _recorded(tensors: Sequence[str]) -> str:
    return f"torch.is_grad_enabled() and ({' or '.join(f'{text}.requires_grad' for text in tensors)})"


SEPARATOR = "\0"
"""Between the tensors of a guard until their tuple is formatted."""
COMPILED = "not torch.compiler.is_compiling()"
GUARD_SUMMARY = "Whether the Triton version supports these arguments; otherwise the original code runs"
MAX_TENSORS_LOOKED_UP_AGAIN = 8
"""Up to this many module tensors, the launcher call looks them up itself instead of taking them from the guard."""


def returns_tensors(graph: Graph) -> bool:
    """Whether the guard returns the tensors for the launcher instead of a boolean."""
    return _has_many_tensors(graph) or any(may_be_elsewhere(graph, item) for item in graph.inputs)


def _has_many_tensors(graph: Graph) -> bool:
    return sum(item.kind is not InputKind.ARGUMENT for item in graph.inputs) > MAX_TENSORS_LOOKED_UP_AGAIN


STORES = {InputKind.PARAMETER: "_parameters", InputKind.BUFFER: "_buffers"}
"""Dictionaries in which a module stores its tensors. Direct access is ten times as fast as attribute lookup."""


def _stores(graph: Graph) -> dict[tuple[str, ...], str]:
    """For each submodule and tensor access, the dictionary of its parent module that stores it."""
    lists = module_lists(graph.modules) if _has_many_tensors(graph) else ()
    accesses = [item.access for item in graph.modules]
    named = [access for access in accesses if not is_indexed(access) or owner_of(access) in lists]
    stores = {tuple(parts(access)): "_modules" for access in named}
    tensors = [item for item in graph.inputs if item.kind in STORES and not is_indexed(item.access)]
    return stores | {tuple(parts(item.access)): STORES[item.kind] for item in tensors}


def _no_overlap(graph: Graph, names: dict[str, str]) -> list[str]:
    """Updated tensors must not overlap other arguments: the kernels read all inputs before they write."""
    changed = list(dict.fromkeys(names[mutation.input] for mutation in graph.mutations))
    others = [names[item.name] for item in graph.inputs if names[item.name] not in changed]
    if not changed or len(changed) + len(others) == 1:
        return []
    return [f"(torch.compiler.is_compiling() or {NO_OVERLAP}(({', '.join([*changed, *others])}), {len(changed)}))"]


def _structure(
    graph: Graph, attributes: Iterable[str], values: list[str], up_to_date: str, *, is_trained: bool
) -> list[str]:
    """The conditions that globals are unchanged, and that the module's structure is the captured one."""
    # The module's own hooks have already run when this code executes; only its class and values need checks.
    same_class = f"{HAS_CLASS}(self, {{kind}})" if is_trained else "type(self) is {kind}"
    conditions = [same_class.format(kind=item.kind) for item in graph.modules if item.access == "self"]
    conditions += [condition for item in graph.modules if item.access == "self" for condition in has_items(item)]
    conditions += [text for text in values if re.search(r"\bself\.\w+( is |\) )", text)]
    submodules = [item for item in graph.modules if item.access != "self"]
    conditions += unchanged_modules(submodules, in_groups=_has_many_tensors(graph))
    conditions += [f"{again} is {first}" for again, first in graph.aliases]
    conditions += attributes
    conditions += values
    return list(dict.fromkeys([*([up_to_date] if up_to_date else []), *conditions]))


def _returning_early(conditions: Sequence[str], graph: Graph) -> str:
    """The statement that refuses a call before what the other conditions read is looked up."""
    if not conditions:
        return ""
    unmet = " and ".join(conditions)
    if len(unmet) > LINE:
        unmet = "\n        {}\n    ".format("\n        and ".join(conditions))
    unmet = f"not ({unmet})" if len(conditions) > 1 or " " in unmet else f"not {unmet}"
    return f"    if {unmet}:\n        return {'None' if returns_tensors(graph) else 'False'}\n"


def _inspected_only(graph: Graph, texts: dict[str, str]) -> list[str]:
    """Conditions on tensors that the original code inspects but the Triton version does not read: dtype, rank and known sizes."""
    conditions = []
    for item in graph.unread_inputs:
        access, kind = item.access, item.type
        *_, last = steps(access) or [None]
        # Another instance of the class may not have the attribute.
        read = access
        if last is not None and not last.is_item:
            read = f"getattr({owner_of(access)}, {quoted(str(last.key))}, None)"
        conditions.append(f"isinstance({read}, torch.Tensor)")
        conditions.append(f"{access}.device == tensors[0].device")
        conditions.append(f"{access}.dtype == torch.{kind.dtype}")
        conditions.append(f"{access}.ndim == {len(kind.shape)}")
        for i, size in enumerate(kind.shape):
            if set(size.symbols()) <= graph.sizes.keys():
                conditions.append(f"{access}.shape[{i}] == {size_text(size, texts)}")
        if kind.is_contiguous:
            conditions.append(f"{access}.is_contiguous()")
    return conditions


def _uses_group_checks(graph: Graph) -> bool:
    """Whether the guard uses group checks: for modules with many tensors, all contiguous."""
    return _has_many_tensors(graph) and all(item.type.is_contiguous for item in graph.inputs)


def _group_inputs(graph: Graph) -> list[GraphInput]:
    """The parameters and buffers with fixed, non-empty shapes."""
    module_tensors = (item for item in graph.inputs if item.kind is not InputKind.ARGUMENT)
    return [item for item in module_tensors if all(size.is_constant and size.constant for size in item.type.shape)]


def _values(graph: Graph) -> list[tuple[str, str]]:
    """For each Python value that was baked into the graph, its access and the condition that it is unchanged.

    The type must match as well: 2 and 2.0 promote tensors differently, and a tensor may replace a number.
    """
    result = []
    checked: set[str] = set()
    for owners, names in _modules_with_equal_values(graph).items():
        expected = {name: graph.constants[f"{owners[0]}.{name}"] for name in names}
        result.append((f"{owners[0]}.{names[0]}", call_text(HAVE_VALUES, [repr(expected), *owners], "        ")))
        checked |= {f"{owner}.{name}" for owner in owners for name in names}
    for access, value in graph.constants.items():
        if access in checked:
            continue
        if value is None or isinstance(value, bool):
            text = f"{access} is {value}"
        elif isinstance(value, list):
            text = call_text(HAS_ITEMS, [access, repr(value)], "        ")
        elif isinstance(value, float) and not math.isfinite(value):
            # NaN is the only value that differs from itself.
            equals = f"{access} != {access}" if math.isnan(value) else f'{access} == float("{value}")'
            text = f"type({access}) is float and {equals}"
        elif is_torch_name(value) and not access.startswith("self."):
            text = f"{access} is {value}"
        elif isinstance(value, str):
            text = f"{access} == {value!r}"
        else:
            text = f"type({access}) is {type(value).__name__} and {access} == {value!r}"
        result.append((access, text))
    return result


def _modules_with_equal_values(graph: Graph) -> dict[tuple[str, ...], list[str]]:
    """Groups of modules with equal attribute values, and the names of these attributes."""
    owners: dict[tuple[str, str], list[str]] = {}
    for access, value in graph.constants.items() if _has_many_tensors(graph) else ():
        owner, _, name = access.rpartition(".")
        special = isinstance(value, float) and not math.isfinite(value)
        if owner.startswith("self.") and name.isidentifier() and not special:
            owners.setdefault((name, repr(value)), []).append(owner)
    groups: dict[tuple[str, ...], list[str]] = {}
    for (name, _), modules in owners.items():
        if len(modules) >= LEAST_MODULES_IN_GROUP:
            groups.setdefault(tuple(modules), []).append(name)
    return groups
