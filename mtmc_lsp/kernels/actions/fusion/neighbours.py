"""*Fuse* the PyTorch operations around a launch into the kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal, assignment_of, before, language_of, statement_of
from mtmc_lsp.kernels.actions.fusion.elementwise import Elementwise, elementwise
from mtmc_lsp.kernels.actions.fusion.launcher import (
    LAUNCH_US,
    OneLaunch,
    assignment_in,
    is_description,
    is_fresh,
    occurrences,
    one_launch,
    only_accesses,
)
from mtmc_lsp.kernels.repairs.site import Edit, replaced
from mtmc_lsp.source.lint.kernel import argument, names_in
from mtmc_lsp.source.syntax import field, line_end, line_of, line_start, text_of, walk

NARROW, FLOATS = ("*fp16", "*bf16"), ("*fp16", "*bf16", "*fp32")


def fuse_following(facts: Facts) -> Iterator[Proposal]:
    """Elementwise operations on a result, which the kernel then stores: ``return torch.relu(out)``.

    Legal if the launcher makes the tensor by ``torch.empty`` and the like, passes it only to this launch, and uses nothing but
    the result of the operations afterwards; and if the kernel does nothing but store it.
    """
    one = one_launch(facts)
    for parameter, node in one.passed.items() if one is not None else ():
        kind = _kind(facts, parameter)
        if one is None or node.type != "identifier" or kind not in FLOATS or one.is_shared(parameter):
            continue
        stores = only_accesses(facts, parameter, "store")
        tail = _tail(one, text_of(node)) if stores is not None and is_fresh(one, text_of(node)) is not None else None
        if stores is None or tail is None or tail[1].widens:
            continue
        edits = [edit for store in stores for edit in _stored(facts, store, tail[1], kind)]
        if edits:
            yield _proposal(facts, parameter, tail, edits, f"writes {text_of(node)} and reads it again")


def fuse_preceding(facts: Facts) -> Iterator[Proposal]:
    """Elementwise operations on an argument, which the kernel then loads: ``kernel[grid](torch.exp(x), ...)``.

    Legal if only this launch uses the result of the operations, the kernel does nothing but load it and writes to no tensor
    that they read, and lanes outside the mask keep their value. The kernel then gets a contiguous tensor, as it got from
    PyTorch.
    """
    one = one_launch(facts)
    for parameter, node in one.passed.items() if one is not None else ():
        kind = _kind(facts, parameter)
        if one is None or kind not in FLOATS or parameter in facts.stored:
            continue
        loads = only_accesses(facts, parameter, "load")
        head = _head(one, parameter, node) if loads is not None else None
        if loads is None or head is None:
            continue
        if head[1].widens and f"{parameter}.dtype" in text_of(facts.site.kernel.body):
            continue
        edits = [_loaded(facts, load, head[1], kind, parameter) for load in loads]
        is_repeated = any(
            facts.site.kernel.enclosing.ancestors(load, "for_statement", "while_statement") for load in loads
        )
        if all(edits):
            kernel = [edit for edit in edits if edit is not None]
            yield _proposal(
                facts, parameter, head, kernel, "writes its result, which the kernel reads", needs_timing=is_repeated
            )


Replaced = tuple[Edit, Elementwise, str, int]
"""The edit of the launcher, the expression, its text, its line."""


def _proposal(
    facts: Facts, parameter: str, part: Replaced, edits: Sequence[Edit], reason: str, *, needs_timing: bool = False
) -> Proposal:
    edit, expression, text, line = part
    moved = float(max((access.tensor_bytes for access in facts.accesses if access.tensor == parameter), default=0))
    saved = 2.0 * moved * max(1, expression.operations)
    return Proposal(
        "fuse",
        facts.name,
        f"Compute {' '.join(text.split())}",
        (edit, *edits),
        line,
        f"PyTorch {reason}, {expression.operations} operations",
        facts.memory_us(saved) + LAUNCH_US * expression.operations,
        facts.moved + saved,
        facts.moved,
        needs_timing=needs_timing,
    )


def _kind(facts: Facts, parameter: str) -> str:
    kinds = {work.launch.signature.get(parameter, "") for work in facts.launches}
    return kinds.pop() if len(kinds) == 1 else ""


# Launchers -----------------------------------------------------------------------------------------------------------


def _tail(one: OneLaunch, tensor: str) -> Replaced | None:
    """The operations on a tensor after the launch, and the edit that removes them."""
    text, imports = one.facts.site.text, one.facts.site.kernel.context.imports
    using = [statement for statement in one.after if occurrences(statement, tensor)]
    if not using:
        return None
    first = using[0]
    in_place = _in_place(first, tensor)
    if in_place is not None:
        expression = elementwise(in_place, tensor, imports)
        if expression is None or not expression.operations or not _is_alone(first, text):
            return None
        edit = Edit(line_start(text, first.start_byte), line_end(text, first.end_byte), "")
        return edit, expression, in_place, line_of(first)
    used = [item for item in occurrences(first, tensor) if not is_description(item)]
    others = [item for statement in using[1:] for item in occurrences(statement, tensor)]
    if first.type not in ("return_statement", "expression_statement") or not all(map(is_description, others)):
        return None
    for node in walk(first):
        inside = [item for item in used if node.start_byte <= item.start_byte < node.end_byte]
        if not node.is_named or not used or len(inside) != len(used) or node.type in ("identifier", "argument_list"):
            continue
        expression = elementwise(text_of(node), tensor, imports)
        if expression is not None and expression.operations:
            return replaced(node, tensor), expression, text_of(node), line_of(node)
    return None


def _in_place(statement: Node, tensor: str) -> str | None:
    """The expression that a statement assigns to the tensor: of ``out *= 2``, ``out.relu_()`` and ``out = -out``."""
    inner = statement.named_children[0] if statement.type == "expression_statement" else None
    left, right = field(inner, "left"), field(inner, "right")
    if inner is None:
        return None
    if inner.type == "assignment" and text_of(left) == tensor:
        return text_of(right)
    if inner.type == "augmented_assignment" and text_of(left) == tensor:
        return f"{tensor} {text_of(field(inner, 'operator')).rstrip('=')} ({text_of(right)})"
    function = field(inner, "function")
    if inner.type == "call" and function is not None and function.type == "attribute":
        method, whole = text_of(field(function, "attribute")), text_of(inner)
        if text_of(field(function, "object")) == tensor and method.endswith("_") and not method.endswith("__"):
            return whole.replace(f".{method}(", f".{method[:-1]}(", 1)
    return None


def _head(one: OneLaunch, parameter: str, node: Node) -> Replaced | None:
    """The operations on an argument before the launch, and the edit that removes them."""
    text, imports = one.facts.site.text, one.facts.site.kernel.context.imports
    statement, value, following = None, node, tuple[Node, ...]()
    if node.type == "identifier":
        pairs = [(i, pair[1]) for i, pair in enumerate(map(assignment_in, one.before)) if _assigns(pair, text_of(node))]
        if len(pairs) != 1 or not _is_used_once(one, text_of(node), pairs[0][0]):
            return None
        position, value = pairs[0]
        statement, following = one.before[position], one.before[position + 1 :]
    names = {name for name in names_in(value) if name not in imports}
    source = next(iter(names)) if len(names) == 1 else ""
    expression = elementwise(text_of(value), source, imports) if source else None
    if expression is None or not expression.operations:
        return None
    if source != text_of(node) and not all(
        is_description(item) for each in following for item in occurrences(each, source)
    ):
        # A statement in between may write to the tensor.
        return None
    written = [name for name in one.facts.stored if name in one.passed and name != parameter]
    if any(item for name in written for item in occurrences(one.passed[name], source) if not is_description(item)):
        return None
    described = [s for s in (*following, one.statements[one.position]) if occurrences(s, text_of(node))]
    if expression.widens and node.type == "identifier" and _describes_type(described, text_of(node)):
        return None
    name = text_of(node) if node.type == "identifier" else source
    strided = any(f"{name}.stride(" in text_of(argument_) for argument_ in one.passed.values())
    if strided and statement is not None and source == name and _is_alone(statement, text):
        edit = Edit(line_start(text, statement.start_byte), line_end(text, statement.end_byte), "")
    else:
        edit = replaced(value, source if strided else f"{source}.contiguous()")
    return edit, expression, text_of(value), line_of(value)


def _assigns(pair: tuple[Node, Node] | None, name: str) -> TypeGuard[tuple[Node, Node]]:
    return pair is not None and text_of(pair[0]) == name


def _is_used_once(one: OneLaunch, tensor: str, position: int) -> bool:
    """Whether the elements of a tensor that a statement assigns are used by the launch alone, as one argument."""
    uses = [i for s in one.statements[position + 1 :] for i in occurrences(s, tensor) if not is_description(i)]
    launch = one.statements[one.position]
    return len(uses) == 1 and launch.start_byte <= uses[0].start_byte < launch.end_byte


def _describes_type(statements: Sequence[Node], tensor: str) -> bool:
    """Whether code depends on the type of a tensor, as ``torch.empty_like(x)`` does."""
    kinds = [item.parent for statement in statements for item in occurrences(statement, tensor) if is_description(item)]
    return any(
        parent is not None
        and (parent.type != "attribute" or text_of(field(parent, "attribute")) in ("dtype", "element_size"))
        for parent in kinds
    )


def _is_alone(statement: Node, text: bytes) -> bool:
    """Whether a statement has its lines for itself."""
    line = text[line_start(text, statement.start_byte) : line_end(text, statement.end_byte)].decode()
    return line.strip() == text_of(statement).strip()


# Kernels -------------------------------------------------------------------------------------------------------------


def _stored(facts: Facts, store: Node, expression: Elementwise, kind: str) -> list[Edit]:
    """The edits that store the result of an expression instead of the value; none if that is not possible."""
    value, language = argument(store, 1, "value"), language_of(facts)
    statement = statement_of(store, facts.site.kernel.body)
    if value is None or statement is None:
        return []
    element, is_sum = text_of(value), value.type not in ("identifier", "call")
    if kind in NARROW and not expression.is_exact:
        element, is_sum = f"({element})" if is_sum else element, False
        element = f"{element}.to({language}.float32)"
    if not expression.repeats or element.isidentifier():
        return [replaced(value, expression.text(element, language, is_sum=is_sum))]
    name = _new_name(facts, "result")
    return [
        before(facts.site.text, statement, f"{name} = {element}"),
        replaced(value, expression.text(name, language)),
    ]


def _loaded(facts: Facts, load: Node, expression: Elementwise, kind: str, parameter: str) -> Edit | None:
    """The edit that computes an expression of what is loaded; None if that is not possible."""
    language = language_of(facts)
    mask, other = argument(load, 1, "mask"), argument(load, 2, "other")
    if mask is not None and other is not None and not expression.keeps(text_of(other)):
        return None
    is_converted = kind in NARROW and not expression.is_exact and not expression.widens
    if not expression.repeats:
        element = f"{text_of(load)}.to({language}.float32)" if is_converted else text_of(load)
        new = expression.text(element, language)
        return replaced(load, f"({new}).to({parameter}.dtype.element_ty)" if is_converted else _bracketed(new, load))
    statement = statement_of(load, facts.site.kernel.body)
    pair = assignment_of(statement) if statement is not None else None
    if statement is None or pair is None or pair[1] != load or is_converted:
        return None
    name = text_of(pair[0])
    at = line_end(facts.site.text, statement.end_byte)
    start = line_start(facts.site.text, statement.start_byte)
    indent = facts.site.text[start : statement.start_byte].decode()
    return Edit(at, at, f"{indent}{name} = {expression.text(name, language)}\n")


def _bracketed(text: str, node: Node) -> str:
    """The text in brackets if the node is an operand."""
    parent = node.parent
    is_operand = parent is not None and parent.type in (
        "binary_operator",
        "attribute",
        "unary_operator",
        "comparison_operator",
    )
    return f"({text})" if (is_operand and not text.endswith(")")) or (is_operand and " " in text) else text


def _new_name(facts: Facts, name: str) -> str:
    taken = {*facts.site.kernel.parameters, *facts.site.kernel.values}
    return next(n for n in (name, *(f"{name}_{i}" for i in range(1, 100))) if n not in taken)
