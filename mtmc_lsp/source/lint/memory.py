"""Checks of loads, stores and pointer arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Finding, Fix, Severity, found
from mtmc_lsp.source.lint.kernel import Kernel, above, argument, names_in
from mtmc_lsp.source.syntax import field, text_of, walk


def unmasked_access(kernel: Kernel) -> Iterator[Finding]:
    """A load or store with no mask, at offsets that the kernel itself compares with a bound elsewhere."""
    bounded = _bounded_names(kernel)
    for name, call in kernel.calls:
        if name not in ("load", "store") or _has_mask(name, call):
            continue
        pointer = argument(call, 0, "pointer")
        if pointer is None or _is_conditional(kernel, call) or not kernel.is_block(pointer):
            continue
        # Only names that occur in the pointer as it is written, or in the pointer that it is called.
        near = {n for item in (pointer, *_values(kernel, pointer)) for n in names_in(item)}
        hit = sorted(near & bounded.keys())
        if hit and not _in_other_loop(kernel, call, bounded[hit[0]]):
            what = "read" if name == "load" else "written"
            message = (
                f"memory is {what} without a mask, although `{hit[0]}` can pass a bound: "
                f"it is compared in line {bounded[hit[0]].start_point[0] - kernel.node.start_point[0] + 1} of the kernel"
            )
            yield found("unmasked-access", Severity.WARNING, call, message)


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
    """Block-valued offsets that are compared with a number, and where; not those that are wrapped or clamped."""
    result: dict[str, Node] = {}
    for node in walk(kernel.body):
        if node.type != "comparison_operator" or len(node.named_children) != 2:
            continue
        operator = next((text_of(child) for child in node.children if not child.is_named), "")
        left, right = node.named_children
        if operator not in ("<", "<=") or kernel.is_block(right) or not _is_bound(kernel, right):
            continue
        plain = left
        while plain.type in ("subscript", "parenthesized_expression"):
            plain = plain.named_children[0]
        if plain.type == "identifier" and kernel.is_block(plain) and not _is_wrapped(kernel, plain):
            result.setdefault(text_of(plain), node)
    return result


def _is_bound(kernel: Kernel, node: Node) -> bool:
    """Whether a number comes from the kernel's parameters alone, and from no loop's variable."""
    names = kernel.names_behind(node)
    return bool(names & kernel.parameters.keys()) and not names & kernel.loop_names


def _is_wrapped(kernel: Kernel, name: Node) -> bool:
    return any(b"%" in (v.text or b"") or b"where" in (v.text or b"") for v in kernel.values.get(text_of(name), ()))


def _is_conditional(kernel: Kernel, call: Node) -> bool:
    """Whether a condition stands before it that may be the bound's own, such as ``if EVEN_N``."""
    return any(True for kind in ("if_statement", "conditional_expression") for _ in above(call, kind, kernel.body))


def _in_other_loop(kernel: Kernel, call: Node, compared: Node) -> bool:
    """Whether it is in a loop that the comparison is not in: whole blocks may be handled apart from the last."""
    kinds = ("for_statement", "while_statement")
    around = {loop.id for kind in kinds for loop in above(compared, kind, kernel.body)}
    return any(loop.id not in around for kind in kinds for loop in above(call, kind, kernel.body))


def int32_offset(kernel: Kernel) -> Iterator[Finding]:
    """A program's number times a runtime size or stride in 32 bits, inside a pointer."""
    # Programs that share the work among them are few, as many as there are multiprocessors.
    if any(name == "num_programs" for name, _ in kernel.calls):
        return
    products: dict[int, dict[str, tuple[Node, Node]]] = {}
    """Where a program's number is asked for, to the products made of it: their text, the number and the product."""
    for name, call in kernel.calls:
        pointer = argument(call, 0, "pointer") if name in ("load", "store") else None
        for source in kernel.sources(pointer) if pointer is not None else ():
            for node in walk(source):
                number = _narrow_number(kernel, node)
                if number is not None:
                    products.setdefault(number.start_byte, {}).setdefault(text_of(node), (number, node))
    wide = _widened(kernel)
    for start, found_products in products.items():
        if start not in wide:
            # One report for a number: what mends one product mends all.
            yield _overflow(kernel, list(found_products.values()))


def _overflow(kernel: Kernel, products: list[tuple[Node, Node]]) -> Finding:
    number, first = min(products, key=lambda item: item[1].start_byte)
    others = len(products) - 1
    what = f"`{text_of(first)}` and {others} more are" if others else f"`{text_of(first)}` is"
    why = "worked out in 32 bits, which overflows where the tensor has 2^31 elements or more"
    message = f"{what} {why}; widen the program's number"
    fix = Fix("Widen to 64 bits", number.start_byte, number.end_byte, f"{text_of(number)}.to(tl.int64)")
    has_tl = kernel.context.imports.get("tl") == "triton.language"
    return found("int32-offset", Severity.HINT, first, message, fix if has_tl else None)


def _narrow_number(kernel: Kernel, node: Node) -> Node | None:
    """The call of ``program_id`` in a product of it and a runtime parameter that is made in 32 bits."""
    for program, other in _factors(node):
        is_wide = "int64" in text_of(node) or any("int64" in text_of(s) for s in kernel.sources(program))
        number = _program_id(kernel, program)
        parameter = kernel.parameters.get(text_of(other)) if other.type == "identifier" else None
        if number is None or parameter is None or is_wide or parameter.is_constexpr or "64" in parameter.annotation:
            continue
        return number
    return None


def _widened(kernel: Kernel) -> set[int]:
    """Where programs' numbers are asked for that have another product in 64 bits: whoever wrote that thought of it."""
    found_numbers = set()
    for node in walk(kernel.body):
        for program, _ in _factors(node):
            number = _program_id(kernel, program) if "int64" in text_of(node) else None
            if number is not None:
                found_numbers.add(number.start_byte)
    return found_numbers


def _factors(node: Node) -> list[tuple[Node, Node]]:
    """Both ways round."""
    if node.type != "binary_operator" or text_of(field(node, "operator")) != "*":
        return []
    left, right = field(node, "left"), field(node, "right")
    return [(left, right), (right, left)] if left is not None and right is not None else []


def _program_id(kernel: Kernel, node: Node) -> Node | None:
    """The call of ``program_id(0)`` that a name or an expression is, and nothing but it."""
    if node.type == "identifier":
        values = kernel.values.get(text_of(node), ())
        return _program_id(kernel, values[0]) if len(values) == 1 and values[0].type == "call" else None
    is_call = node.type == "call" and kernel.triton_name(field(node, "function")) == "program_id"
    # The other axes of a grid have 65535 programs at most, and count heads and the like.
    return node if is_call and text_of(argument(node, 0, "axis")) == "0" else None
