"""Edits of a kernel's parameters and decorators."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts
from mtmc_lsp.kernels.repairs.site import Edit, Launch
from mtmc_lsp.source.syntax import field, line_start, text_of

JIT = re.compile(r"@\s*(?:(\w+)\.)?jit\b")


def even_name(facts: Facts, length: str) -> str:
    """A new name for a constant that tells whether blocks divide a length; empty if it is in use."""
    name = f"EVEN_{length.upper().strip('_')}"
    taken = {*facts.site.kernel.parameters, *facts.site.kernel.values}
    return "" if name in taken else name


def can_have_heuristics(facts: Facts, needed: Sequence[str]) -> bool:
    """Whether constants may be derived from arguments at each launch.

    The kernel must be launched in the file and not called by another kernel, and each launch must pass the parameters that
    the constants are derived from: heuristics see no defaults.
    """
    site = facts.site
    if not module_prefix(facts) or not site.launches or is_called(facts):
        return False
    tuned = " ".join(text_of(item) for item in site.kernel.decorators)
    return all(
        not is_splatted(launch)
        and all(name in launch.passed(site.kernel) or re.search(rf"['\"]{name}['\"]", tuned) for name in needed)
        for launch in site.launches
    )


def is_splatted(launch: Launch) -> bool:
    """Whether a launch passes ``*args`` or ``**kwargs``."""
    return has_unknown_positions(launch) or has_unknown_keywords(launch)


def has_unknown_positions(launch: Launch) -> bool:
    """Whether a launch passes ``*args``, so that the text does not tell the parameters of positional arguments."""
    return any(item.type == "list_splat" for item in _arguments(launch))


def has_unknown_keywords(launch: Launch) -> bool:
    """Whether a launch passes ``**kwargs``, which may contain options and block sizes."""
    return any(item.type == "dictionary_splat" for item in _arguments(launch))


def _arguments(launch: Launch) -> list[Node]:
    arguments = field(launch.call, "arguments")
    return arguments.named_children if arguments is not None else []


def is_called(facts: Facts) -> bool:
    """Whether other code uses the kernel by its name without a launch: another kernel calls it, or a wrapper takes it."""
    name = re.escape(facts.name)
    text = facts.site.text.decode(errors="replace")
    uses = len(re.findall(rf"(?<![\w.]){name}\b", text))
    strings = len(re.findall(rf"[\"'#][^\"'\n]*\b{name}\b", text))
    return uses - strings > 1 + len(facts.site.launches)


def module_prefix(facts: Facts) -> str:
    """``triton`` as the file names it in ``@triton.jit``; empty if it imports ``jit`` alone."""
    for decorator in facts.site.kernel.decorators:
        matched = JIT.match(text_of(decorator))
        if matched and matched[1]:
            return matched[1]
    return ""


def jit_decorator(facts: Facts) -> Node | None:
    """The node of ``@triton.jit``."""
    return next((item for item in facts.site.kernel.decorators if JIT.match(text_of(item))), None)


def decorated(facts: Facts, lines: Sequence[str], *, is_outer: bool = False) -> Edit | None:
    """The edit that inserts decorators above ``@triton.jit``; None if there is none.

    Args:
        is_outer: whether they go above heuristics, which derive constants from what an autotuner chooses.
    """
    node = jit_decorator(facts)
    if is_outer and node is not None:
        heuristics = [item for item in facts.site.kernel.decorators if ".heuristics(" in text_of(item)]
        node = min([node, *heuristics], key=lambda item: item.start_byte)
    if node is None:
        return None
    start = line_start(facts.site.text, node.start_byte)
    indent = facts.site.text[start : node.start_byte].decode()
    return Edit(start, start, "".join(f"{indent}{line}\n" for line in lines))


def with_parameter(facts: Facts, text: str) -> Edit | None:
    """The edit that adds a parameter at the end, in the layout of the others; None after ``*`` or ``**``."""
    parameters = field(facts.site.kernel.node, "parameters")
    items = [item for item in parameters.named_children if item.type != "comment"] if parameters is not None else []
    if parameters is None or not items or any("splat" in item.type for item in items):
        return None
    last = items[-1]
    if last.type in ("default_parameter", "typed_default_parameter"):
        text = f"{text} = False"
    source = facts.site.text
    rest = source[last.end_byte : parameters.end_byte]
    comma = rest.find(b",")
    comment = rest.find(b"#")
    has_comma = comma >= 0 and (comment < 0 or comma < comment)
    start = line_start(source, last.start_byte)
    before = source[start : last.start_byte]
    if before.strip() or b"\n" not in rest:
        # The parameters share a line.
        at = last.end_byte
        return Edit(at, at, f", {text}")
    at = last.end_byte + (comma + 1 if has_comma else 0)
    newline = source.find(b"\n", at)
    trailing = source[at:newline]
    # A comment behind the last parameter stays behind it.
    lead = "" if has_comma else ","
    ending = "," if has_comma else ""
    return Edit(at, newline, f"{lead}{trailing.decode()}\n{before.decode()}{text}{ending}")


def annotation(facts: Facts) -> str:
    """``tl.constexpr`` as the file writes it."""
    texts = [p.annotation for p in facts.site.kernel.parameters.values() if p.is_constexpr]
    return texts[-1].split("#")[0].strip() if texts else "tl.constexpr"
