"""Numbers that a file names: constants, and the configurations of ``@triton.autotune``, written out or made in a loop."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field

from tree_sitter import Node

from mtmc_lsp.source.chunks import Chunk
from mtmc_lsp.source.lint.kernel import Kernel, argument, names_in
from mtmc_lsp.source.outline import Outline
from mtmc_lsp.source.syntax import field, parse, text_of, walk

OPTIONS = {"num_warps": 4, "num_stages": 3}
"""Arguments of a launch that are none of the kernel's, with Triton's own defaults."""
DEPTH = 4
"""How far configurations are followed through functions and names."""
MOST = 512
"""Configurations of one comprehension."""


class _Unknown:
    """Of a value that the text does not name."""


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Place:
    """Values that are set somewhere, and where that is."""

    values: Mapping[str, object]
    start: int
    """Bytes of the file."""
    end: int
    types: Mapping[str, str] = dataclass_field(default_factory=dict)
    """Triton's types of what is passed, where they are known."""


def constant(node: Node | str | None, constants: Mapping[str, object]) -> object:
    """A number, a string, a truth value, None or a list of these that is written down, or a name that holds one."""
    text = (node if isinstance(node, str) else text_of(node)).strip()
    if text in constants:
        return constants[text]
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN
    return value if value is None or isinstance(value, (int, float, str, list, tuple)) else UNKNOWN


def module_constants(outline: Outline) -> dict[str, object]:
    """Names that the file sets once, to something written down."""
    found: dict[str, object] = {}
    twice: set[str] = set()
    for chunk in outline.chunks:
        if b"=" not in chunk.text or _is_definition(chunk):
            continue
        for name, value in assigned(parse(chunk.text)):
            twice |= {name} & found.keys()
            found[name] = constant(value, {})
    return {name: value for name, value in found.items() if name not in twice and value is not UNKNOWN}


def _is_definition(chunk: Chunk) -> bool:
    return any(line.startswith((b"def ", b"class ", b"async ", b"@")) for line in chunk.text.split(b"\n"))


def assigned(root: Node) -> Iterator[tuple[str, Node]]:
    """Plain names that are assigned to, each with its value."""
    for node in walk(root):
        left, right = field(node, "left"), field(node, "right")
        if node.type == "assignment" and left is not None and right is not None and left.type == "identifier":
            # `BLOCK: tl.constexpr = tl.constexpr(64)` is a number too.
            is_wrapped = right.type == "call" and text_of(field(right, "function")).endswith("constexpr")
            yield text_of(left), (argument(right, 0, "value") or right) if is_wrapped else right


def configurations(kernel: Kernel, outline: Outline, chunk: Chunk, constants: Mapping[str, object]) -> Iterator[Place]:
    """What ``@triton.autotune`` chooses from, as far as it is written down."""
    for decorator in kernel.decorators:
        call = next((item for item in decorator.named_children if item.type == "call"), None)
        if call is None or not text_of(field(call, "function")).endswith("autotune"):
            continue
        given = argument(call, 0, "configs")
        if given is not None:
            yield from _within(given, chunk, outline, constants, DEPTH)


def _within(node: Node, chunk: Chunk, outline: Outline, constants: Mapping[str, object], depth: int) -> Iterator[Place]:
    """The configurations in an expression or a function, and in what it names."""
    for call in walk(node):
        if call.type == "call" and text_of(field(call, "function")).endswith("Config"):
            for bound in _bindings(call, node, constants):
                place = _configuration(call, chunk, {**constants, **bound})
                if place is not None:
                    yield place
    if depth:
        for name in dict.fromkeys(names_in(node)):
            for other in outline.chunks:
                defined = _defined(other, name)
                if defined is not None:
                    yield from _within(defined, other, outline, constants, depth - 1)


def _defined(chunk: Chunk, name: str) -> Node | None:
    """What a top-level statement defines under a name: a function's body, or a value."""
    begin = chunk.text.lstrip()
    if not (begin.startswith(f"def {name}(".encode()) or begin.startswith(name.encode())):
        return None
    for node in parse(chunk.text).children:
        if node.type == "function_definition" and text_of(field(node, "name")) == name:
            return field(node, "body")
        inner = node.named_children[0] if node.type == "expression_statement" and node.named_children else None
        if inner is not None and inner.type == "assignment" and text_of(field(inner, "left")) == name:
            return field(inner, "right")
    return None


def _bindings(call: Node, within: Node, constants: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """The values of the loop variables of the comprehension around a call; once nothing where there is none."""
    clauses: list[tuple[str, list[object]]] = []
    node = call.parent
    while node is not None and node != within.parent:
        if node.type in ("list_comprehension", "generator_expression"):
            for clause in (child for child in node.named_children if child.type == "for_in_clause"):
                values = constant(field(clause, "right"), constants)
                if not isinstance(values, (list, tuple)):
                    return
                clauses.append((text_of(field(clause, "left")), list(values)))
        node = node.parent
    for values in itertools.islice(itertools.product(*(options for _, options in clauses)), MOST):
        yield dict(zip((name for name, _ in clauses), values, strict=True))


def _configuration(call: Node, chunk: Chunk, constants: Mapping[str, object]) -> Place | None:
    given = argument(call, 0, "kwargs")
    pairs = given.named_children if given is not None and given.type == "dictionary" else []
    values = {
        str(constant(field(pair, "key"), {})): constant(field(pair, "value"), constants)
        for pair in pairs
        if pair.type == "pair"
    }
    for position, name in enumerate(OPTIONS, 1):
        option = argument(call, position, name)
        if option is not None:
            values[name] = constant(option, constants)
    if any(value is UNKNOWN for value in values.values()):
        return None
    return Place(values, chunk.start + call.start_byte, chunk.start + call.end_byte)
