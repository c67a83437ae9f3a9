"""How a file's own Triton kernels are launched, as far as its text says so: what is needed to compile them without running it.

A kernel's block sizes come from its autotune configurations, from the numbers at its launches and from its defaults; the types
of its tensors from the workload directive of the function that launches it. A pointer of which nothing is known counts as float16
(as float8 where the file speaks of that): whatever does not fit then fits with no wider type either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.core.dtypes import POINTER_TYPES
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.source.chunks import Chunk
from mtmc_lsp.source.lint import context_of
from mtmc_lsp.source.lint.kernel import Kernel, above, argument, kernels_in
from mtmc_lsp.source.outline import LAUNCH, Outline
from mtmc_lsp.source.syntax import field, parse, text_of, walk, with_decorators
from mtmc_lsp.source.triton.launch_values import (
    OPTIONS,
    UNKNOWN,
    Place,
    assigned,
    configurations,
    constant,
    module_constants,
)
from mtmc_lsp.source.workload.directive import parse_directive

ACCESSES = ("load", "store", "make_block_ptr", "make_tensor_descriptor")
MOST = 48
"""Forms of one file; the largest blocks are looked at."""


@dataclass(frozen=True)
class LaunchForm:
    """One way in which a kernel is launched."""

    launch: KernelLaunch
    start: int
    """Bytes of the file: where its blocks are chosen."""
    end: int
    is_tuned: bool
    """Whether it is one of several configurations to choose from."""

    @property
    def volume(self) -> int:
        """The product of its whole numbers, to tell large forms from small ones."""
        product = self.launch.num_stages
        for value in self.launch.constexprs.values():
            product *= value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
        return product


def launch_forms(outline: Outline, path: str) -> list[LaunchForm]:
    """Every form of every kernel whose constants the file names."""
    context = context_of(outline)
    constants = module_constants(outline)
    narrow = "float8_e5m2" if re.search(rb"fp8|float8", outline.text) else "float16"
    found: list[LaunchForm] = []
    for chunk in outline.chunks:
        if b"jit" not in chunk.text:
            continue
        for kernel in kernels_in(parse(chunk.text), context):
            parent = with_decorators(kernel.node).parent
            # A kernel inside a function is no attribute of the module, by which it would be found.
            if parent is not None and parent.type == "module":
                launches = _launches(kernel, outline, path, constants)
                tuned = list(configurations(kernel, outline, chunk, constants))
                found += _forms(kernel, chunk, launches, tuned, narrow)
    return sorted(found, key=lambda form: form.volume, reverse=True)[:MOST]


def _forms(
    kernel: Kernel, chunk: Chunk, launches: list[Place], tuned: list[Place], narrow: str
) -> Iterator[LaunchForm]:
    # What is neither launched here nor tuned is a helper, or is launched from another file with sizes of its own.
    if not launches and not tuned:
        return
    name = field(kernel.node, "name") or kernel.node
    usual = Place({}, chunk.start + name.start_byte, chunk.start + name.end_byte)
    written = {p.name: constant(p.default, {}) for p in kernel.parameters.values()}
    defaults = {name: value for name, value in written.items() if value is not UNKNOWN}
    seen = set()
    for launch in launches or [usual]:
        for chosen in tuned or [launch]:
            made = _launch(kernel, {**defaults, **launch.values, **chosen.values}, launch.types, narrow)
            if made is not None and (key := (repr(made), chosen.start)) not in seen:
                seen.add(key)
                yield LaunchForm(made, chosen.start, chosen.end, bool(tuned))


def _launch(kernel: Kernel, values: Mapping[str, object], types: Mapping[str, str], narrow: str) -> KernelLaunch | None:
    """The launch with these values; None where a constant of the kernel is not known."""
    pointers = _pointers(kernel, narrow)
    signature: dict[str, str] = {}
    constexprs: dict[str, object] = {}
    for name, parameter in kernel.parameters.items():
        if parameter.is_constexpr:
            if name not in values:
                return None
            constexprs[name] = values[name]
        elif name in values and values[name] in (None, 1) and not isinstance(values[name], bool):
            # Triton compiles such arguments in, too.
            constexprs[name] = values[name]
        else:
            signature[name] = pointers.get(name, "i32")
            if name in pointers and name in types:
                signature[name] = types[name]
    # Sizes and strides of real tensors mostly are multiples of 16, and pointers are.
    options = {name: int(str(values.get(name, usual))) for name, usual in OPTIONS.items()}
    return KernelLaunch(kernel.name, signature, constexprs, **options, divisible_by_16=tuple(signature))


# Pointers ------------------------------------------------------------------------------------------------------------


def _pointers(kernel: Kernel, narrow: str) -> dict[str, str]:
    """Parameters that memory is read or written through, with a type for each."""
    found: dict[str, str] = {}
    indices: set[str] = set()
    for name, call in kernel.calls:
        pointer = argument(call, 0, "base" if name.startswith("make") else "pointer")
        if pointer is None or not (name in ACCESSES or name.startswith("atomic")):
            continue
        for base in _bases(kernel, pointer):
            found[base] = POINTER_TYPES[narrow]
        # What is read to work out another address is an index.
        for source in kernel.sources(pointer):
            inner = (n for n in walk(source) if n.type == "call" and kernel.triton_name(field(n, "function")) == "load")
            for load in inner:
                read = argument(load, 0, "pointer")
                indices |= set(_bases(kernel, read)) if read is not None else set()
    return found | dict.fromkeys(indices & found.keys(), POINTER_TYPES["int64"])


def _bases(kernel: Kernel, pointer: Node) -> set[str]:
    """The parameters that an address begins with: the leftmost name of a sum, and of what that name was made of."""
    found: set[str] = set()
    seen: set[str] = set()
    pending: list[Node | None] = [pointer]
    while pending:
        node = _leftmost(kernel, pending.pop())
        name = text_of(node) if node is not None and node.type == "identifier" else ""
        if name in kernel.parameters:
            found.add(name)
        if name and name not in seen:
            seen.add(name)
            pending.extend(kernel.values.get(name, ()))
    return found


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


def _launches(kernel: Kernel, outline: Outline, path: str, constants: Mapping[str, object]) -> list[Place]:
    """Where a kernel is launched, and with which values."""
    found = []
    for chunk in outline.chunks:
        if kernel.name.encode() not in chunk.text or not LAUNCH.search(chunk.text):
            continue
        for call in walk(parse(chunk.text)):
            called = field(call, "function") if call.type == "call" else None
            if called is not None and called.type == "subscript" and text_of(field(called, "value")) == kernel.name:
                found.append(_at_launch(kernel, call, called, outline, chunk, path, constants))
    return found


def _at_launch(
    kernel: Kernel, call: Node, called: Node, outline: Outline, chunk: Chunk, path: str, constants: Mapping[str, object]
) -> Place:
    around = list(above(call, "function_definition", call))
    local: dict[str, list[object]] = {}
    for function in around[:1]:
        for name, default in _defaults(function):
            local.setdefault(name, []).append(constant(default, constants))
        for name, value in assigned(function):
            local.setdefault(name, []).append(constant(value, constants))
    known = {**constants, **{name: values[0] for name, values in local.items() if len(values) == 1}}
    passed = dict(_passed(kernel, call))
    values = {name: constant(node, known) for name, node in passed.items()}
    for name in _innermost_strides(passed):
        values[name] = 1
    types = _types(passed, around, outline, chunk, path)
    kept = {name: value for name, value in values.items() if value is not UNKNOWN}
    return Place(kept, chunk.start + called.start_byte, chunk.start + called.end_byte, types)


def _defaults(function: Node) -> Iterator[tuple[str, Node]]:
    """A function's parameters that have a default, which is what a launch in it gets where nobody says otherwise."""
    parameters = field(function, "parameters")
    for item in parameters.named_children if parameters is not None else ():
        name, value = field(item, "name"), field(item, "value")
        if name is not None and value is not None:
            yield text_of(name), value


def _passed(kernel: Kernel, call: Node) -> Iterator[tuple[str, Node]]:
    """Parameter (or option) to what is passed for it."""
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
    """Parameters that get the last of several strides of a tensor, which is 1 for dense ones."""
    last: dict[str, tuple[int, str]] = {}
    for name, node in passed.items():
        owner, _, rest = text_of(node).partition(".stride(")
        number = constant(rest.removesuffix(")"), {}) if rest.endswith(")") else UNKNOWN
        if isinstance(number, int) and not isinstance(number, bool):
            # A last stride is also called -1.
            place = number if number >= 0 else 99 + number
            last[owner] = max(last.get(owner, (0, "")), (place, name))
    return [name for place, name in last.values() if place > 0]


def _types(passed: Mapping[str, Node], around: list[Node], outline: Outline, chunk: Chunk, path: str) -> dict[str, str]:
    """Types of the arguments that the launching function was itself given, by its workload directive."""
    for function in around:
        line = chunk.line + function.start_point[0]
        target = outline.target_at(line)
        if target is None or not target.has_directive:
            continue
        try:
            workload = parse_directive(outline.text, target.target, path)
        except MtmcError:
            # A run of that function says what is wrong with its directive.
            return {}
        tensors = {a.name: a.tensor.dtype for a in workload.arguments if a.tensor is not None} if workload else {}
        given = {name: tensors.get(text_of(node)) for name, node in passed.items()}
        return {name: POINTER_TYPES[dtype] for name, dtype in given.items() if dtype is not None}
    return {}
