"""Checks of ``@triton.autotune``."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Finding, Severity, found
from mtmc_lsp.source.lint.kernel import Kernel, argument
from mtmc_lsp.source.syntax import field, text_of, walk


def autotune_key(kernel: Kernel) -> Iterator[Finding]:
    """An autotune key that names no parameter, that is tuned itself, or that is not there."""
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
                known = ", ".join(kernel.parameters)
                message = f"the key {name!r} names no parameter of {kernel.name}; there is {known}"
                yield found("autotune-key", Severity.ERROR, node, message)
            elif name in tuned:
                message = f"{name!r} is what is tuned, so as a key it has no effect"
                yield found("autotune-key", Severity.HINT, node, message)
        if not names and not key.named_children and (size := _bound(kernel)):
            message = (
                f"with no key the first call's choice is kept for every size; {size!r} bounds what the kernel reads, so it "
                "belongs into the key"
            )
            yield found("autotune-key", Severity.HINT, key, message)


def _tuned(call: Node) -> set[str]:
    """Parameters that the configurations set, where these are written in place."""
    keys = set()
    for node in walk(call):
        if node.type == "call" and text_of(field(node, "function")).endswith("Config"):
            given = argument(node, 0, "kwargs")
            for pair in given.named_children if given is not None and given.type == "dictionary" else ():
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
