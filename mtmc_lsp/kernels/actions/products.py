"""*Precision* of products: operands as they are stored, and float32 products on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import MICROSECONDS, Facts, Proposal, call_pointer
from mtmc_lsp.kernels.repairs.site import Edit, replaced
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_of, text_of, walk

HALVES = {"*fp16": "fp16", "*bf16": "bf16"}
FLOAT32 = ("tl.float32", "float32", "triton.language.float32")
TENSOR_FLOAT_PRODUCTS = 3.0
"""Products of TF32 operands that replace one of float32 operands."""


def stored_operands(facts: Facts) -> Iterator[Proposal]:
    """Products of 16-bit operands that are converted to float32 first.

    Legal because a product of 16-bit operands is exact in float32, in which tensor cores add up. Both operands must have the
    same type in memory.
    """
    for _, call in ((n, c) for n, c in facts.site.kernel.calls if n == "dot"):
        operands = [item for i, name in enumerate(("input", "other")) if (item := argument(call, i, name)) is not None]
        plain = [_converted(facts, operand) for operand in operands]
        kinds = {kind for item in plain if item is not None for kind in [item[1]]}
        if len(plain) != 2 or None in plain or len(kinds) != 1 or kinds <= {""}:
            continue
        edits = tuple(edit for item in plain if item is not None for edit in item[0])
        kind = HALVES[next(iter(kinds))]
        work = facts.operations
        rates = facts.device.flops
        yield Proposal(
            "precision",
            facts.name,
            f"Multiply {kind} operands as they are",
            edits,
            line_of(call),
            f"the operands are {kind} in memory, and products of float32 operands do not use {kind} tensor cores",
            MICROSECONDS * work * (1.0 / rates["fp32"] - 1.0 / rates[kind]),
        )


def _converted(facts: Facts, operand: Node) -> tuple[tuple[Edit, ...], str] | None:
    """The edits that remove the conversion of an operand, and its type in memory; None without such a conversion."""
    kernel = facts.site.kernel
    node = operand
    if operand.type == "identifier":
        values = kernel.values.get(text_of(operand), ())
        uses = [n for n in walk(kernel.body) if n.type == "identifier" and text_of(n) == text_of(operand)]
        if len(values) != 1 or len(uses) != 2:
            return None
        node = values[0]
    function = field(node, "function")
    inner = field(function, "object") if function is not None and function.type == "attribute" else None
    if node.type != "call" or inner is None or text_of(field(function, "attribute")) != "to":
        return None
    if text_of(argument(node, 0, "dtype")) not in FLOAT32:
        return None
    load = inner
    if inner.type == "identifier":
        values = kernel.values.get(text_of(inner), ())
        load = values[0] if len(values) == 1 else inner
    if load.type != "call" or kernel.triton_name(field(load, "function")) != "load":
        return None
    pointer = call_pointer(load)
    bases = facts.site.bases(pointer) if pointer is not None else []
    access = facts.access_at(load)
    names = bases or ([access.tensor] if access is not None else [])
    kinds = {work.launch.signature.get(name, "") for work in facts.launches for name in names}
    kind = kinds.pop() if len(kinds) == 1 else ""
    return ((replaced(node, text_of(inner)),), kind) if kind in HALVES else None


def split_float32(facts: Facts) -> Iterator[Proposal]:
    """Float32 products on tensor cores, each operand split into TF32 parts: errors of about 1e-6, and rounding changes."""
    rates = facts.device.flops
    if facts.device.vendor != "nvidia" or not any(
        kind == "*fp32" for work in facts.launches for kind in work.launch.signature.values()
    ):
        return
    edits, lines = [], []
    for name, call in facts.site.kernel.calls:
        if name != "dot":
            continue
        exact = argument(call, 9, "allow_tf32")
        precision = argument(call, 9, "input_precision")
        if exact is not None and text_of(exact) == "False":
            keyword = exact.parent
            assert keyword is not None
            edits.append(replaced(keyword, 'input_precision="tf32x3"'))
        elif precision is not None and text_of(precision).strip("\"'") == "ieee":
            edits.append(replaced(precision, '"tf32x3"'))
        else:
            continue
        lines.append(line_of(call))
    if edits:
        gain = 1.0 / rates["fp32"] - TENSOR_FLOAT_PRODUCTS / rates["tf32"]
        yield Proposal(
            "precision",
            facts.name,
            "Multiply float32 operands in three TF32 parts",
            tuple(edits),
            lines[0],
            "float32 products do not use tensor cores",
            MICROSECONDS * facts.operations * gain,
            needs_timing=True,
        )
