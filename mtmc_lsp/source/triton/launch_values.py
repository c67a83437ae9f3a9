"""Constants in a file, and the configurations of ``@triton.autotune``, written as a list or generated in a loop."""

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
"""Launch options that are not kernel parameters, with Triton's defaults."""
MAX_DEPTH = 4
"""Maximum depth when following names and function calls to configurations."""
MAX_CONFIGURATIONS = 512
"""Maximum number of configurations in one comprehension."""


class _Unknown:
    """Type of :data:`UNKNOWN`."""


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class LaunchValues:
    """Values that are set at one position in a file."""

    values: Mapping[str, object]
    start: int
    """Byte range in the file."""
    end: int
    types: Mapping[str, str] = dataclass_field(default_factory=dict)
    """Triton types of the arguments, if known."""


def constant(node: Node | str | None, constants: Mapping[str, object]) -> object:
    """Evaluate a literal number, string, bool, None or list of these, or the name of a constant."""
    text = (node if isinstance(node, str) else text_of(node)).strip()
    if text in constants:
        return constants[text]
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN
    return value if value is None or isinstance(value, (int, float, str, list, tuple)) else UNKNOWN


def module_constants(outline: Outline) -> dict[str, object]:
    """Names that the file assigns exactly once, to a literal."""
    constants: dict[str, object] = {}
    reassigned: set[str] = set()
    for chunk in outline.chunks:
        if b"=" not in chunk.text or _is_definition(chunk):
            continue
        for name, value in assignments(parse(chunk.text)):
            reassigned |= {name} & constants.keys()
            constants[name] = constant(value, {})
    return {name: value for name, value in constants.items() if name not in reassigned and value is not UNKNOWN}


def _is_definition(chunk: Chunk) -> bool:
    return any(line.startswith((b"def ", b"class ", b"async ", b"@")) for line in chunk.text.split(b"\n"))


def assignments(root: Node) -> Iterator[tuple[str, Node]]:
    """Assignments to plain names, as name and value."""
    for node in walk(root):
        left, right = field(node, "left"), field(node, "right")
        if node.type == "assignment" and left is not None and right is not None and left.type == "identifier":
            # Unwrap `BLOCK: tl.constexpr = tl.constexpr(64)`.
            is_wrapped = right.type == "call" and text_of(field(right, "function")).endswith("constexpr")
            yield text_of(left), (argument(right, 0, "value") or right) if is_wrapped else right


def configurations(
    kernel: Kernel, outline: Outline, chunk: Chunk, constants: Mapping[str, object]
) -> Iterator[LaunchValues]:
    """The configurations of ``@triton.autotune`` that are written in the file."""
    for decorator in kernel.decorators:
        call = next((item for item in decorator.named_children if item.type == "call"), None)
        if call is None or not text_of(field(call, "function")).endswith("autotune"):
            continue
        configs_argument = argument(call, 0, "configs")
        if configs_argument is not None:
            yield from _configurations_in(configs_argument, chunk, outline, constants, MAX_DEPTH)


def _configurations_in(
    node: Node, chunk: Chunk, outline: Outline, constants: Mapping[str, object], depth: int
) -> Iterator[LaunchValues]:
    """The configurations in an expression or function, and in the names that it refers to."""
    for call in walk(node):
        if call.type == "call" and text_of(field(call, "function")).endswith("Config"):
            for loop_values in _bindings(call, node, constants):
                configuration = _configuration(call, chunk, {**constants, **loop_values})
                if configuration is not None:
                    yield configuration
    if depth:
        for name in dict.fromkeys(names_in(node)):
            for other_chunk in outline.chunks:
                definition = _definition_of(other_chunk, name)
                if definition is not None:
                    yield from _configurations_in(definition, other_chunk, outline, constants, depth - 1)


def _definition_of(chunk: Chunk, name: str) -> Node | None:
    """The definition of a name in a top-level statement: the body of a function, or an assigned value."""
    statement_start = chunk.text.lstrip()
    if not (statement_start.startswith(f"def {name}(".encode()) or statement_start.startswith(name.encode())):
        return None
    for node in parse(chunk.text).children:
        if node.type == "function_definition" and text_of(field(node, "name")) == name:
            return field(node, "body")
        inner = node.named_children[0] if node.type == "expression_statement" and node.named_children else None
        if inner is not None and inner.type == "assignment" and text_of(field(inner, "left")) == name:
            return field(inner, "right")
    return None


def _bindings(call: Node, within: Node, constants: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Values of the loop variables of the enclosing comprehensions; one empty dictionary without comprehensions."""
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
    for values in itertools.islice(itertools.product(*(options for _, options in clauses)), MAX_CONFIGURATIONS):
        yield dict(zip((name for name, _ in clauses), values, strict=True))


def _configuration(call: Node, chunk: Chunk, constants: Mapping[str, object]) -> LaunchValues | None:
    configs_argument = argument(call, 0, "kwargs")
    pairs = (
        configs_argument.named_children
        if configs_argument is not None and configs_argument.type == "dictionary"
        else []
    )
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
    return LaunchValues(values, chunk.start + call.start_byte, chunk.start + call.end_byte)
