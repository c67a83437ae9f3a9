"""Derive launch parameters of a file's Triton kernels from its source.

The block sizes of a kernel come from its autotune configurations, constants at its launches, and its defaults. The dtypes
of its tensors come from the workload directive of the launching function. Other pointers are assumed to be float16 (float8 if the
file mentions it): kernels that exceed a resource limit with this dtype also exceed it with any wider one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tree_sitter import Node

from mtmc_lsp.core.dtypes import POINTER_TYPES
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.source.chunks import Chunk
from mtmc_lsp.source.lint import context_of
from mtmc_lsp.source.lint.finding import Context
from mtmc_lsp.source.lint.kernel import Enclosing, Kernel, argument, kernels_in
from mtmc_lsp.source.outline import LAUNCH, Outline
from mtmc_lsp.source.syntax import field, parse, text_of, walk, with_decorators
from mtmc_lsp.source.triton.assumed_values import assumed_values
from mtmc_lsp.source.triton.launch_values import (
    OPTIONS,
    UNKNOWN,
    LaunchValues,
    assignments,
    configurations,
    constant,
    module_constants,
)
from mtmc_lsp.source.workload.directive import parse_directive

ACCESSES = ("load", "store", "make_block_ptr", "make_tensor_descriptor")
MAX_FORMS = 48
"""Maximum number of launch forms per file; the ones with the largest blocks are used."""


@dataclass(frozen=True)
class LaunchForm:
    """One combination of values with which a kernel is launched."""

    launch: KernelLaunch
    start: int
    """Byte range in the file where the block sizes are chosen."""
    end: int
    is_tuned: bool
    """Whether it is one of several autotune configurations."""
    assumed: tuple[str, ...] = ()
    """Constants that the file does not tell: their values are usual ones."""

    @property
    def volume(self) -> int:
        """Product of the integer constants, as a measure of the block size."""
        product = self.launch.num_stages
        for value in self.launch.constexprs.values():
            product *= value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
        return product


def launch_forms(outline: Outline, path: str, *, assumes: bool = False) -> list[LaunchForm]:
    """All launch forms of kernels whose constants are known from the file.

    Args:
        assumes: whether the others have forms, too, with usual values for what is unknown and pointers to float32.
    """
    context = context_of(outline)
    constants = module_constants(outline)
    # Kernels mix loaded values with sums in float32, so this compiles most often where nothing is known.
    narrow = "float32" if assumes else "float8_e5m2" if re.search(rb"fp8|float8", outline.text) else "float16"
    forms: list[LaunchForm] = []
    calls = _launch_calls(outline, context)
    for chunk in outline.chunks:
        if b"jit" not in chunk.text:
            continue
        for kernel in kernels_in(parse(chunk.text), context):
            parent = with_decorators(kernel.node).parent
            # A kernel inside a function is not a module attribute, so it could not be imported.
            if parent is not None and parent.type == "module":
                launches = [_launch_values(kernel, call, outline, path, constants) for call in calls[kernel.name]]
                tuned = list(configurations(kernel, outline, chunk, constants))
                forms += _forms(kernel, chunk, launches, tuned, narrow, assumed_values(kernel) if assumes else None)
    return sorted(forms, key=lambda form: form.volume, reverse=True)[:MAX_FORMS]


def _forms(
    kernel: Kernel,
    chunk: Chunk,
    launches: list[LaunchValues],
    tuned: list[LaunchValues],
    narrow: str,
    assumed: Mapping[str, object] | None,
) -> Iterator[LaunchForm]:
    # A kernel without launches and configurations is a helper, or is launched from another file.
    if not launches and not tuned and (assumed is None or _is_helper(kernel)):
        return
    usual = assumed or {}
    name = field(kernel.node, "name") or kernel.node
    without_launch = LaunchValues({}, chunk.start + name.start_byte, chunk.start + name.end_byte)
    default_values = {p.name: constant(p.default, {}) for p in kernel.parameters.values()}
    defaults = {name: value for name, value in default_values.items() if value is not UNKNOWN}
    yielded = set()
    for launch in launches or [without_launch]:
        for configuration in tuned or [launch]:
            known = {**defaults, **launch.values, **configuration.values}
            if assumed is not None:
                # The launcher's default None usually stands for a number that its callers compute.
                pointers = _pointers(kernel, narrow)
                known = {name: value for name, value in known.items() if value is not None or name in pointers}
            launch_with_values = _launch(kernel, {**usual, **known}, launch.types, narrow)
            if (
                launch_with_values is not None
                and (key := (repr(launch_with_values), configuration.start)) not in yielded
            ):
                yielded.add(key)
                unknown = tuple(name for name in usual if name not in known)
                yield LaunchForm(launch_with_values, configuration.start, configuration.end, bool(tuned), unknown)


def _is_helper(kernel: Kernel) -> bool:
    """Whether a kernel returns a value to another one, or accesses no memory."""
    returns = (node for node in walk(kernel.body) if node.type == "return_statement" and node.named_children)
    return any(returns) or not any(name in ACCESSES or name.startswith("atomic") for name, _ in kernel.calls)


def _launch(kernel: Kernel, values: Mapping[str, object], types: Mapping[str, str], narrow: str) -> KernelLaunch | None:
    """The launch with these values; None if a constexpr parameter is unknown."""
    pointers = _pointers(kernel, narrow)
    signature: dict[str, str] = {}
    constexprs: dict[str, object] = {}
    for name, parameter in kernel.parameters.items():
        if parameter.is_constexpr:
            if name not in values:
                return None
            constexprs[name] = values[name]
        elif name in values and values[name] in (None, 1) and not isinstance(values[name], bool):
            # Triton treats such arguments as constants, too.
            constexprs[name] = values[name]
        else:
            signature[name] = pointers.get(name, "i32")
            if name in pointers and name in types:
                signature[name] = types[name]
    # Pointers are multiples of 16, and sizes and strides usually are.
    options = {name: int(str(values.get(name, usual))) for name, usual in OPTIONS.items()}
    return KernelLaunch(kernel.name, signature, constexprs, **options, divisible_by_16=tuple(signature))


# Pointers ------------------------------------------------------------------------------------------------------------


def _pointers(kernel: Kernel, narrow: str) -> dict[str, str]:
    """Parameters used as pointers in memory accesses, with a Triton type for each."""
    types: dict[str, str] = {}
    indices: set[str] = set()
    for name, call in kernel.calls:
        pointer = argument(call, 0, "base" if name.startswith("make") else "pointer")
        if pointer is None or not (name in ACCESSES or name.startswith("atomic")):
            continue
        for base in _bases(kernel, pointer):
            types[base] = POINTER_TYPES[narrow]
        # A value that is loaded to compute another address is an index.
        for source in kernel.sources(pointer):
            loads = (n for n in walk(source) if n.type == "call" and kernel.triton_name(field(n, "function")) == "load")
            for load in loads:
                read = argument(load, 0, "pointer")
                indices |= set(_bases(kernel, read)) if read is not None else set()
    return types | dict.fromkeys(indices & types.keys(), POINTER_TYPES["int64"])


def _bases(kernel: Kernel, pointer: Node) -> set[str]:
    """The parameters that an address starts with: the leftmost name of a sum, following assignments."""
    bases: set[str] = set()
    visited: set[str] = set()
    pending: list[Node | None] = [pointer]
    while pending:
        node = _leftmost(kernel, pending.pop())
        name = text_of(node) if node is not None and node.type == "identifier" else ""
        if name in kernel.parameters:
            bases.add(name)
        if name and name not in visited:
            visited.add(name)
            pending.extend(kernel.values.get(name, ()))
    return bases


def _leftmost(kernel: Kernel, node: Node | None) -> Node | None:
    """``x_ptr`` of ``(x_ptr + offset).to(...)`` and of ``tl.multiple_of(x_ptr + offset, 16)``."""
    while node is not None:
        kind = node.type
        if kind == "binary_operator":
            node = field(node, "left")
        elif kind == "parenthesized_expression":
            node = node.named_children[0] if node.named_children else None
        elif kind == "subscript":
            node = field(node, "value")
        elif kind == "attribute":
            node = field(node, "object")
        elif kind == "call":
            is_tritons = bool(kernel.triton_name(field(node, "function")))
            node = argument(node, 0, "base") if is_tritons else field(node, "function")
        else:
            return node
    return None


# Launches ------------------------------------------------------------------------------------------------------------


class _LaunchCall(NamedTuple):
    """A launch ``kernel[grid](...)`` in the source."""

    call: Node
    callee: Node
    chunk: Chunk
    functions: tuple[Node, ...]
    """The functions around the launch, innermost first."""


def _launch_calls(outline: Outline, context: Context) -> Mapping[str, Sequence[_LaunchCall]]:
    """The launches of each kernel."""
    calls: dict[str, list[_LaunchCall]] = {name: [] for name in context.kernels}
    for chunk in outline.chunks:
        if not LAUNCH.search(chunk.text):
            continue
        root = parse(chunk.text)
        enclosing = Enclosing(root)
        for call in walk(root):
            callee = field(call, "function") if call.type == "call" else None
            name = text_of(field(callee, "value")) if callee is not None and callee.type == "subscript" else ""
            if callee is not None and name in calls:
                functions = tuple(enclosing.ancestors(call, "function_definition"))
                calls[name].append(_LaunchCall(call, callee, chunk, functions))
    return calls


def _launch_values(
    kernel: Kernel, launch: _LaunchCall, outline: Outline, path: str, constants: Mapping[str, object]
) -> LaunchValues:
    call, callee, chunk, enclosing_functions = launch
    local: dict[str, list[object]] = {}
    for function in enclosing_functions[:1]:
        for name, default in _defaults(function):
            local.setdefault(name, []).append(constant(default, constants))
        for name, value in assignments(function):
            local.setdefault(name, []).append(constant(value, constants))
    local_constants = {**constants, **{name: values[0] for name, values in local.items() if len(values) == 1}}
    passed = dict(_bind_arguments(kernel, call))
    values = {name: constant(node, local_constants) for name, node in passed.items()}
    for name in _innermost_strides(passed):
        values[name] = 1
    types = _types(passed, enclosing_functions, outline, chunk, path)
    known_values = {name: value for name, value in values.items() if value is not UNKNOWN}
    return LaunchValues(known_values, chunk.start + callee.start_byte, chunk.start + callee.end_byte, types)


def _defaults(function: Node) -> Iterator[tuple[str, Node]]:
    """Parameters of the launching function with a default value, which is assumed for its launches."""
    parameters = field(function, "parameters")
    for item in parameters.named_children if parameters is not None else ():
        name, value = field(item, "name"), field(item, "value")
        if name is not None and value is not None:
            yield text_of(name), value


def _bind_arguments(kernel: Kernel, call: Node) -> Iterator[tuple[str, Node]]:
    """Kernel parameter (or launch option) to the argument passed for it."""
    arguments = field(call, "arguments")
    names = list(kernel.parameters)
    position = 0
    for node in arguments.named_children if arguments is not None else ():
        if node.type == "keyword_argument":
            value = field(node, "value")
            if value is not None:
                yield text_of(field(node, "name")), value
        elif node.type not in ("comment", "list_splat", "dictionary_splat") and position < len(names):
            yield names[position], node
            position += 1


def _innermost_strides(passed: Mapping[str, Node]) -> list[str]:
    """Parameters that receive the last stride of a tensor, which is 1 for dense tensors."""
    last: dict[str, tuple[int, str]] = {}
    for name, node in passed.items():
        tensor, _, rest = text_of(node).partition(".stride(")
        number = constant(rest.removesuffix(")"), {}) if rest.endswith(")") else UNKNOWN
        if isinstance(number, int) and not isinstance(number, bool):
            # The last stride may also be written as -1.
            dimension = number if number >= 0 else 99 + number
            last[tensor] = max(last.get(tensor, (0, "")), (dimension, name))
    return [name for dimension, name in last.values() if dimension > 0]


def _types(
    passed: Mapping[str, Node], enclosing_functions: Sequence[Node], outline: Outline, chunk: Chunk, path: str
) -> dict[str, str]:
    """Triton types of arguments, from the workload directive of the launching function."""
    for function in enclosing_functions:
        line = chunk.line + function.start_point[0]
        target = outline.target_at(line)
        if target is None or not target.has_directive:
            continue
        try:
            workload = parse_directive(outline.text, target.target, path)
        except MtmcError:
            # Running that function reports the error in its directive.
            return {}
        tensors = {path: tensor.dtype for path, tensor in workload.tensors.items()} if workload else {}
        passed_dtypes = {name: tensors.get(text_of(node)) for name, node in passed.items()}
        return {name: POINTER_TYPES[dtype] for name, dtype in passed_dtypes.items() if dtype is not None}
    return {}
