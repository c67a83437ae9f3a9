"""Checks of loads, stores and pointer arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Finding, Fix, Severity, finding_at
from mtmc_lsp.source.lint.kernel import Kernel, ancestors, argument, names_in
from mtmc_lsp.source.syntax import field, text_of, walk


def unmasked_access(kernel: Kernel) -> Iterator[Finding]:
    """A load or store without a mask, at offsets that the kernel compares with a bound elsewhere."""
    bounded = _bounded_names(kernel)
    for name, call in kernel.calls:
        if name not in ("load", "store") or _has_mask(name, call):
            continue
        pointer = argument(call, 0, "pointer")
        if pointer is None or _is_conditional(kernel, call) or not kernel.is_block(pointer):
            continue
        # Consider only names in the pointer expression itself, or in the value of the pointer variable.
        pointer_names = {n for item in (pointer, *_values(kernel, pointer)) for n in names_in(item)}
        checked = sorted(pointer_names & bounded.keys())
        if checked and not _in_other_loop(kernel, call, bounded[checked[0]]):
            action = "read" if name == "load" else "written"
            message = (
                f"memory is {action} without a mask, although `{checked[0]}` can exceed a bound: "
                f"it is compared in line {bounded[checked[0]].start_point[0] - kernel.node.start_point[0] + 1} of the kernel"
            )
            yield finding_at("unmasked-access", Severity.WARNING, call, message)


def _has_mask(name: str, call: Node) -> bool:
    if argument(call, 1 if name == "load" else 2, "mask") is not None:
        return True
    arguments = field(call, "arguments")
    return any(
        c.type in ("list_splat", "dictionary_splat") for c in (arguments.named_children if arguments else ())
    ) or (argument(call, 99, "boundary_check") is not None)


def _values(kernel: Kernel, pointer: Node) -> tuple[Node, ...]:
    return kernel.values.get(text_of(pointer), ()) if pointer.type == "identifier" else ()


def _bounded_names(kernel: Kernel) -> dict[str, Node]:
    """Offset blocks that are compared with a bound, and the comparison. Wrapped or clamped offsets are excluded."""
    result: dict[str, Node] = {}
    for node in walk(kernel.body):
        if node.type != "comparison_operator" or len(node.named_children) != 2:
            continue
        operator = next((text_of(child) for child in node.children if not child.is_named), "")
        left, right = node.named_children
        if operator not in ("<", "<=") or kernel.is_block(right) or not _is_bound(kernel, right):
            continue
        operand = left
        while operand.type in ("subscript", "parenthesized_expression"):
            operand = operand.named_children[0]
        if operand.type == "identifier" and kernel.is_block(operand) and not _is_wrapped(kernel, operand):
            result.setdefault(text_of(operand), node)
    return result


def _is_bound(kernel: Kernel, node: Node) -> bool:
    """Whether a value depends on kernel parameters and not on a loop variable."""
    names = kernel.dependencies(node)
    return bool(names & kernel.parameters.keys()) and not names & kernel.loop_names


def _is_wrapped(kernel: Kernel, name: Node) -> bool:
    return any(b"%" in (v.text or b"") or b"where" in (v.text or b"") for v in kernel.values.get(text_of(name), ()))


def _is_conditional(kernel: Kernel, call: Node) -> bool:
    """Whether the call is inside a condition, such as ``if EVEN_N``, that may check the bound."""
    return any(True for kind in ("if_statement", "conditional_expression") for _ in ancestors(call, kind, kernel.body))


def _in_other_loop(kernel: Kernel, call: Node, compared: Node) -> bool:
    """Whether the call is in a loop without the comparison. Full blocks may be processed separately from the last one."""
    kinds = ("for_statement", "while_statement")
    compared_loops = {loop.id for kind in kinds for loop in ancestors(compared, kind, kernel.body)}
    return any(loop.id not in compared_loops for kind in kinds for loop in ancestors(call, kind, kernel.body))


def int32_offset(kernel: Kernel) -> Iterator[Finding]:
    """A 32-bit product of a program id and a runtime size or stride in a pointer expression."""
    # A persistent kernel has few program instances, about one per SM.
    if any(name == "num_programs" for name, _ in kernel.calls):
        return
    products: dict[int, dict[str, tuple[Node, Node]]] = {}
    """Start of each ``program_id`` call, to its products: their text, the program id call and the product."""
    for name, call in kernel.calls:
        pointer = argument(call, 0, "pointer") if name in ("load", "store") else None
        for source in kernel.sources(pointer) if pointer is not None else ():
            for node in walk(source):
                program_id = _narrow_program_id(kernel, node)
                if program_id is not None:
                    products.setdefault(program_id.start_byte, {}).setdefault(text_of(node), (program_id, node))
    widened = _widened(kernel)
    for start, products_of_id in products.items():
        if start not in widened:
            # One finding per program id: one fix resolves all its products.
            yield _overflow(kernel, list(products_of_id.values()))


def _overflow(kernel: Kernel, products: list[tuple[Node, Node]]) -> Finding:
    program_id, first = min(products, key=lambda item: item[1].start_byte)
    more = len(products) - 1
    subject = f"`{text_of(first)}` and {more} more are" if more else f"`{text_of(first)}` is"
    problem = "computed in 32 bits and overflows for tensors with 2^31 elements or more"
    message = f"{subject} {problem}; convert the program id to 64 bits"
    fix = Fix("Convert to 64 bits", program_id.start_byte, program_id.end_byte, f"{text_of(program_id)}.to(tl.int64)")
    has_tl = kernel.context.imports.get("tl") == "triton.language"
    return finding_at("int32-offset", Severity.HINT, first, message, fix if has_tl else None)


def _narrow_program_id(kernel: Kernel, node: Node) -> Node | None:
    """The ``program_id`` call in a 32-bit product of a program id and a runtime parameter."""
    for factor, other_factor in _factors(node):
        is_wide = "int64" in text_of(node) or any("int64" in text_of(s) for s in kernel.sources(factor))
        program_id = _program_id(kernel, factor)
        parameter = kernel.parameters.get(text_of(other_factor)) if other_factor.type == "identifier" else None
        if program_id is None or parameter is None or is_wide or parameter.is_constexpr or "64" in parameter.annotation:
            continue
        return program_id
    return None


def _widened(kernel: Kernel) -> set[int]:
    """Starts of ``program_id`` calls that are also used in a 64-bit product: the author has considered overflow."""
    starts = set()
    for node in walk(kernel.body):
        for factor, _ in _factors(node):
            program_id = _program_id(kernel, factor) if "int64" in text_of(node) else None
            if program_id is not None:
                starts.add(program_id.start_byte)
    return starts


def _factors(node: Node) -> list[tuple[Node, Node]]:
    """Both factors of a product, in both orders."""
    if node.type != "binary_operator" or text_of(field(node, "operator")) != "*":
        return []
    left, right = field(node, "left"), field(node, "right")
    return [(left, right), (right, left)] if left is not None and right is not None else []


def _program_id(kernel: Kernel, node: Node) -> Node | None:
    """The ``program_id(0)`` call that an expression or variable consists of, if any."""
    if node.type == "identifier":
        values = kernel.values.get(text_of(node), ())
        return _program_id(kernel, values[0]) if len(values) == 1 and values[0].type == "call" else None
    is_call = node.type == "call" and kernel.triton_name(field(node, "function")) == "program_id"
    # The other grid axes have at most 65535 program instances, typically for heads or batches.
    return node if is_call and text_of(argument(node, 0, "axis")) == "0" else None
