"""*Direct launch* of compiled kernels: ``kernel[grid](...)`` no longer searches for the compiled version in each launch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal, all_launches, before
from mtmc_lsp.kernels.actions.launch.helper import HELPER, NAME
from mtmc_lsp.kernels.actions.signatures import is_called, module_prefix
from mtmc_lsp.kernels.repairs.site import Edit
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_of, line_start, parse, text_of, with_decorators

KIND = "direct-launch"
FIRST_VERSION = (3, 4)
"""Version of Triton with ``triton.knobs``."""
SAVED_US = 10.0
"""Host time that a direct launch saves, roughly: 11 us on an H100 host with Triton 3.6."""
OF_LAYOUT = ("dtype", "data_ptr", "element_size", "shape", "stride", "numel", "is_contiguous", "ndim", "dim", "size")
"""What heuristics may read of a tensor."""
DEFINITIONS = ("function_definition", "class_definition", "decorated_definition")


def direct_launch(facts: Facts) -> Iterator[Proposal]:
    """A decorator that keeps compiled versions, and launches them without a search.

    Legal if the file uses the kernel for launches alone, and heuristics read nothing of tensors but their layout, type and
    alignment. Launches get the same compiled version as before, since the key holds all that Triton
    specialises on, and the values that an autotuner and heuristics read; what the key does not cover is left to Triton. Only a
    measurement can judge, and only where the host takes most of the time.
    """
    site = facts.site
    if module_prefix(facts) != "triton" or facts.triton < FIRST_VERSION or not site.launches or is_called(facts):
        return
    functions = _functions(site.text)
    if not all(_is_covered(text_of(item), functions) for item in site.kernel.decorators):
        return
    if re.search(rf"\b{re.escape(facts.name)}\.\w", site.text.decode(errors="replace")):
        return
    if any(argument(launch.call, 99, "warmup") is not None for launch in all_launches([site])):
        return
    helper = _helper(site.text, with_decorators(site.kernel.node))
    if helper is None:
        return
    first = min(site.kernel.decorators, key=lambda item: item.start_byte)
    head = before(site.text, first, f"@{NAME}")
    yield Proposal(
        KIND,
        facts.name,
        "Launch compiled versions directly",
        # Of two edits at one place, the later one comes first in the text.
        (head, *helper),
        line_of(site.kernel.node),
        "the host takes longer to launch the kernel than the GPU to run it, and half of that is a search",
        SAVED_US * sum(1 for _ in facts.launches),
        needs_timing=True,
    )


def together(found: Sequence[Proposal]) -> list[Proposal]:
    """Proposals with one direct launch for all kernels of a file, since each alone saves a small part of a test's time."""
    direct = [item for item in found if item.name == KIND]
    others = [item for item in found if item.name != KIND]
    if len(direct) < 2:
        return [*others, *direct]
    # The helper is one of them, and comes last.
    edits = {(edit.start, edit.new): edit for item in direct for edit in sorted(item.edits, key=lambda e: len(e.new))}
    ordered = sorted(edits.values(), key=lambda edit: len(edit.new))
    kernels, saved = ", ".join(item.kernel for item in direct), sum(item.saved_us for item in direct)
    whole = replace(
        direct[0], kernel=kernels, edits=tuple(ordered), line=min(item.line for item in direct), saved_us=saved
    )
    return [*others, whole]


def tuned_and_direct(found: Sequence[Proposal]) -> list[Proposal]:
    """Autotuners together with direct launches of their kernels.

    An autotuner makes each launch longer, so it may hide the gain of its choice.
    """
    direct = {item.kernel: item for item in found if item.name == KIND}
    return [
        replace(
            item,
            title=f"{item.title}, and launch it directly",
            # Of two edits at one place, the later one comes first in the text.
            edits=(*item.edits, *direct[item.kernel].edits),
            rationale="the kernel is faster with another configuration, but the autotuner makes its launch longer",
            follows=item.title,
            needs_timing=True,
        )
        for item in found
        if item.name == "autotune" and not item.fallback_for and item.kernel in direct
    ]


def _functions(text: bytes) -> dict[str, str]:
    """The text of each function of a file, by name."""
    nodes = [node for node in parse(text).named_children if node.type == "function_definition"]
    return {text_of(field(node, "name")): text_of(node) for node in nodes}


def _is_covered(decorator: str, functions: Mapping[str, str]) -> bool:
    """Whether a version depends on nothing but what the key holds, as far as a decorator decides it.

    Args:
        functions: those of the file, by name: heuristics may be among them.
    """
    if re.match(r"@triton\.(jit|autotune)\b", decorator):
        return True
    entries = re.findall(r"""['"]\w+['"]\s*:\s*(lambda\b|\w+(?=\s*[,}]))?""", decorator)
    named = [functions.get(name, "") for name in entries if name != "lambda"]
    return (
        decorator.startswith("@triton.heuristics(")
        and bool(entries)
        and entries.count("lambda") == len(re.findall(r"\blambda\b", decorator))
        and _reads_layouts(decorator)
        and all(_is_heuristic(text) for text in named)
    )


def _is_heuristic(function: str) -> bool:
    """Whether a function reads its only parameter by keys alone, of tensors nothing but their layout."""
    signature = re.match(r"def \w+\(\s*(\w+)[^,()]*\)", function)
    if signature is None:
        return False
    name = signature[1]
    uses, by_key = len(re.findall(rf"\b{name}\b", function)), len(re.findall(rf"""\b{name}\[['"]\w+['"]\]""", function))
    return uses == by_key + 1 and _reads_layouts(function)


def _reads_layouts(text: str) -> bool:
    """Whether heuristics read no values of tensors."""
    reads = re.findall(r"""\w+\[['"]\w+['"]\](\s*\.\s*\w+)?""", text)
    return all(not read or read.replace(" ", "").lstrip(".") in OF_LAYOUT for read in reads)


def _helper(text: bytes, kernel: Node) -> list[Edit] | None:
    """The edits that insert the helper above the first definition; None if it needs names that are imported later."""
    if re.search(rf"^class {NAME}\b".encode(), text, re.MULTILINE):
        return []
    root = parse(text)
    first = next((node for node in root.named_children if node.type in DEFINITIONS), None)
    if first is None or first.start_byte > kernel.start_byte:
        return None
    above = [text_of(node) for node in root.named_children if node.end_byte <= first.start_byte]
    imported = [
        name for name in ("torch", "triton") if re.search(rf"^import .*\b{name}$", "\n".join(above), re.MULTILINE)
    ]
    if "triton" not in imported:
        return None
    if re.search(rf"\b{NAME}\b".encode(), text):
        return None
    # Comments of the definition stay with it.
    start, previous = first, first.prev_named_sibling
    while previous is not None and previous.type == "comment" and previous.end_point[0] == start.start_point[0] - 1:
        start, previous = previous, previous.prev_named_sibling
    at = line_start(text, start.start_byte)
    missing = "" if "torch" in imported else "import torch\n\n\n"
    return [Edit(at, at, f"{missing}{HELPER}\n\n")]
