"""Checks of ``@triton.autotune``."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Finding, Severity, finding_at
from mtmc_lsp.source.lint.kernel import Kernel, argument
from mtmc_lsp.source.syntax import field, text_of, walk


def autotune_key(kernel: Kernel) -> Iterator[Finding]:
    """An autotune key that is not a parameter, that is itself tuned, or that is missing."""
    for decorator in kernel.decorators:
        call = next((item for item in decorator.named_children if item.type == "call"), None)
        if call is None or not text_of(field(call, "function")).endswith("autotune"):
            continue
        key = argument(call, 1, "key")
        if key is None or key.type not in ("list", "tuple"):
            continue
        names = [(text_of(item).strip("\"'"), item) for item in key.named_children if item.type == "string"]
        tuned = _tuned(call)
        for name, node in names:
            if name not in kernel.parameters:
                parameters = ", ".join(kernel.parameters)
                message = f"the key {name!r} is not a parameter of {kernel.name}; its parameters are {parameters}"
                yield finding_at("autotune-key", Severity.ERROR, node, message)
            elif name in tuned:
                message = f"{name!r} is set by the tuned configurations, so it has no effect as a key"
                yield finding_at("autotune-key", Severity.HINT, node, message)
        if not names and not key.named_children and (size := _bound(kernel)):
            message = (
                f"without a key, the configuration chosen in the first call is used for all sizes; "
                f"{size!r} bounds the memory accesses, so add it to the key"
            )
            yield finding_at("autotune-key", Severity.HINT, key, message)


def _tuned(call: Node) -> set[str]:
    """Parameters set by configurations that are written inside the decorator."""
    keys = set()
    for node in walk(call):
        if node.type == "call" and text_of(field(node, "function")).endswith("Config"):
            options = argument(node, 0, "kwargs")
            for pair in options.named_children if options is not None and options.type == "dictionary" else ():
                keys.add(text_of(field(pair, "key")).strip("\"'"))
    return keys


def _bound(kernel: Kernel) -> str:
    """A runtime parameter that block offsets are compared with."""
    for node in walk(kernel.body):
        if node.type == "comparison_operator" and len(node.named_children) == 2:
            left, right = node.named_children
            parameter = kernel.parameters.get(text_of(right))
            if parameter is not None and not parameter.is_constexpr and kernel.is_block(left):
                return parameter.name
    return ""
