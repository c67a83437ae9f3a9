"""Checks of loads, stores and pointer arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Finding, Fix, Severity, finding_at
from mtmc_lsp.source.lint.kernel import Kernel, argument, names_in
from mtmc_lsp.source.syntax import field, text_of, walk


def unmasked_access(kernel: Kernel) -> Iterator[Finding]:
    """A load or store without a mask, at offsets that the kernel compares with a bound elsewhere."""
    bounded = _bounded_names(kernel)
    checked_by_pointer: dict[str, list[str]] = {}
    for name, call in kernel.calls:
        if name not in ("load", "store") or _has_mask(name, call):
            continue
        pointer = argument(call, 0, "pointer")
        if pointer is None or _is_conditional(kernel, call) or not kernel.is_block(pointer):
            continue
        key = text_of(pointer)
        if key not in checked_by_pointer:
            # Consider only names in the pointer expression itself, or in the value of the pointer variable.
            pointer_names = {n for item in (pointer, *_values(kernel, pointer)) for n in names_in(item)}
            checked_by_pointer[key] = sorted(pointer_names & bounded.keys())
        checked = checked_by_pointer[key]
        if checked and not _in_other_loop(kernel, call, bounded[checked[0]]):
            action = "read" if name == "load" else "written"
            message = (
                f"memory is {action} without a mask, although `{checked[0]}` can exceed a bound: "
                f"it is compared in line {bounded[checked[0]].start_point[0] - kernel.node.start_point[0] + 1} of the kernel"
            )
            fix = _masked(kernel, name, call, pointer, bounded)
            yield finding_at("unmasked-access", Severity.WARNING, call, message, fix)


def _masked(kernel: Kernel, name: str, call: Node, pointer: Node, bounded: dict[str, Node]) -> Fix | None:
    """The call with a mask that compares every block of offsets in its pointer, as the kernel compares it elsewhere."""
    arguments = field(call, "arguments")
    blocks = dict.fromkeys(name for item in walk(pointer) for name in _block_name(kernel, item))
    if arguments is None or not blocks or not blocks.keys() <= bounded.keys():
        return None
    comparisons = [bounded[block] for block in blocks]
    if any(node.start_byte > call.start_byte and not _is_of_parameters(kernel, node) for node in comparisons):
        return None
    texts = [_compared(block, node, pointer) for block, node in zip(blocks, comparisons, strict=True)]
    mask = texts[0] if len(texts) == 1 else " & ".join(f"({text})" for text in texts)
    # A variable that holds this mask already is shorter.
    named = [n for n, values in kernel.values.items() if len(values) == 1 and text_of(values[0]) == mask]
    before = [n for n in named if kernel.values[n][0].start_byte < call.start_byte]
    text = f"mask={before[0] if before else mask}" + (", other=0.0" if name == "load" else "")
    separator = "" if text_of(arguments).rstrip(") \n").endswith(",") else ", "
    end = arguments.end_byte - 1
    return Fix("Add the mask", end, end, f"{separator}{text}")


def _compared(block: str, comparison: Node, pointer: Node) -> str:
    """The comparison with the block in the form that the pointer has it in: ``rows < n`` for ``rows[:, None] < n``."""
    left, text = comparison.named_children[0], text_of(comparison)
    uses = (node for node in walk(pointer) if node.type == "identifier" and text_of(node) == block)
    use = next(uses, None)
    if use is not None and use.parent is not None and use.parent.type == "subscript":
        use = use.parent
    used = text_of(use) if use is not None else block
    return used + text[len(text_of(left)) :] if text_of(left) != used else text


def _block_name(kernel: Kernel, node: Node) -> tuple[str, ...]:
    return (text_of(node),) if node.type == "identifier" and kernel.is_block(node) else ()


def _is_of_parameters(kernel: Kernel, comparison: Node) -> bool:
    """Whether the bound of a comparison consists of parameters, so that it is known everywhere in the kernel."""
    return all(name in kernel.parameters for name in names_in(comparison.named_children[1]))


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
    seen: set[str] = set()
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
        if operand.type == "identifier" and text_of(operand) not in seen:
            seen.add(text_of(operand))
            if kernel.is_block(operand) and not _is_wrapped(kernel, operand):
                result[text_of(operand)] = node
    return result


def _is_bound(kernel: Kernel, node: Node) -> bool:
    """Whether a value depends on kernel parameters and not on a loop variable."""
    names = frozenset(names_in(node))
    return bool(names & kernel.names_from_parameters) and not names & kernel.names_from_loops


def _is_wrapped(kernel: Kernel, name: Node) -> bool:
    return any(b"%" in (v.text or b"") or b"where" in (v.text or b"") for v in kernel.values.get(text_of(name), ()))


def _is_conditional(kernel: Kernel, call: Node) -> bool:
    """Whether the call is inside a condition, such as ``if EVEN_N``, that may check the bound."""
    return any(True for _ in kernel.enclosing.ancestors(call, "if_statement", "conditional_expression"))


def _in_other_loop(kernel: Kernel, call: Node, compared: Node) -> bool:
    """Whether the call is in a loop without the comparison. Full blocks may be processed separately from the last one."""
    kinds = ("for_statement", "while_statement")
    compared_loops = {loop.id for loop in kernel.enclosing.ancestors(compared, *kinds)}
    return any(loop.id not in compared_loops for loop in kernel.enclosing.ancestors(call, *kinds))


def int32_offset(kernel: Kernel) -> Iterator[Finding]:
    """A 32-bit product of a program id and a runtime size or stride in a pointer expression."""
    # A persistent kernel has few program instances, about one per SM.
    if any(name == "num_programs" for name, _ in kernel.calls):
        return
    products: dict[int, dict[str, tuple[Node, Node]]] = {}
    """Start of each ``program_id`` call, to its products: their text, the program id call and the product."""
    accesses = (argument(call, 0, "pointer") for name, call in kernel.calls if name in ("load", "store"))
    for source in kernel.sources(*(pointer for pointer in accesses if pointer is not None)):
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
    overflows = f"{'overflow' if more else 'overflows'} for tensors with 2^31 elements or more"
    message = f"{subject} computed in 32 bits and {overflows}; convert the program id to 64 bits"
    fix = Fix("Convert to 64 bits", program_id.start_byte, program_id.end_byte, f"{text_of(program_id)}.to(tl.int64)")
    has_tl = kernel.context.imports.get("tl") == "triton.language"
    return finding_at("int32-offset", Severity.HINT, first, message, fix if has_tl else None)


def _narrow_program_id(kernel: Kernel, node: Node) -> Node | None:
    """The ``program_id`` call in a 32-bit product of a program id and a runtime parameter."""
    for factor, other_factor in _factors(node):
        program_id = _program_id(kernel, factor)
        parameter = kernel.parameters.get(text_of(other_factor)) if other_factor.type == "identifier" else None
        if program_id is None or parameter is None or parameter.is_constexpr or "64" in parameter.annotation:
            continue
        if "int64" not in text_of(node) and not any("int64" in text_of(s) for s in kernel.sources(factor)):
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
