"""What an optimisation of a kernel's source reads, and what it proposes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tree_sitter import Node

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.results import KernelReport
from mtmc_lsp.kernels.messages import Access, LaunchWork
from mtmc_lsp.kernels.repairs.site import Edit, Launch, Site
from mtmc_lsp.source.lint.kernel import names_in
from mtmc_lsp.source.syntax import field, line_of, line_start, text_of, walk

MICROSECONDS = 1e6
MOST_CONFIGS = 12
"""Configurations of an autotuner."""
SIMPLE = ("expression_statement", "assignment", "augmented_assignment")


@dataclass(frozen=True)
class Facts:
    """One kernel in the file, and what a call on the workload showed of it."""

    site: Site
    accesses: tuple[Access, ...]
    launches: tuple[LaunchWork, ...]
    reports: tuple[KernelReport, ...]
    """By cross-compilation, with the constants of the launches."""
    device: DeviceModel
    has_gpu: bool
    triton: tuple[int, ...]
    """Version of Triton, as (3, 4)."""
    most_configs: int = MOST_CONFIGS
    """Configurations that can be compiled in the time that is left."""

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return self.site.kernel.name

    @cached_property
    def moved(self) -> float:
        """Bytes of all active lanes in one call."""
        return float(sum(access.bytes for access in self.accesses))

    @cached_property
    def operations(self) -> float:
        """Floating-point operations of one call."""
        return sum(work.operations for work in self.launches)

    @cached_property
    def least_bytes(self) -> float:
        """Bytes of one call if each tensor moves once: less than the accessed bytes where programs read the same elements."""
        tensors: dict[tuple[str, str], int] = {}
        for access in self.accesses:
            key = (access.tensor, access.operation)
            tensors[key] = tensors.get(key, 0) + access.bytes
        sizes = {access.tensor: access.tensor_bytes for access in self.accesses}
        return float(sum(min(moved, sizes[tensor] or moved) for (tensor, _), moved in tensors.items()))

    @cached_property
    def bound_us(self) -> float:
        """The roofline's lower bound of one call, in microseconds."""
        return max(self.memory_us(self.least_bytes), MICROSECONDS * self.operations / self.device.flops["fp32"])

    def memory_us(self, moved: float) -> float:
        """Time to move bytes from or to device memory."""
        return MICROSECONDS * moved / self.device.bandwidth

    def cache_us(self, moved: float) -> float:
        """Time to move bytes from or to the last-level cache."""
        return MICROSECONDS * moved / self.device.l2_bandwidth

    def access_at(self, node: Node) -> Access | None:
        """The accesses by the load or store of a node, as far as the workload reaches it."""
        lines = range(line_of(node), node.end_point[0] + 2)
        return next((access for access in self.accesses if access.line in lines), None)

    @cached_property
    def constants(self) -> dict[str, object]:
        """Compile-time constants of the first launch."""
        return dict(self.launches[0].launch.constexprs) if self.launches else {}

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Integer arguments of the first launch."""
        return dict(self.launches[0].numbers) if self.launches else {}

    @cached_property
    def is_tuned(self) -> bool:
        """Whether an autotuner chooses constants."""
        return any("autotune" in text_of(item) for item in self.site.kernel.decorators)

    @cached_property
    def stored(self) -> frozenset[str]:
        """Parameters that the kernel writes."""
        stored = {access.tensor for access in self.accesses if access.operation != "load"}
        for name, call in self.site.kernel.calls:
            pointer = call_pointer(call) if name == "store" or name.startswith("atomic") else None
            stored |= set(self.site.bases(pointer)) if pointer is not None else set()
        return frozenset(stored)


@dataclass(frozen=True)
class Proposal:
    """One edit of a kernel or of its launches that may make it faster."""

    name: str
    """Kind of the change: ``hoist``, ``autotune``."""
    kernel: str
    title: str
    """One line for people, which begins with a verb."""
    edits: tuple[Edit, ...]
    line: int
    """1-based line of the first edit."""
    rationale: str
    """Reason from the kernel's profile, one sentence."""
    saved_us: float
    """Estimate of the microseconds that one call saves."""
    bytes_before: float = 0.0
    bytes_after: float = 0.0
    needs_timing: bool = False
    """Whether only a measurement can tell if it pays; then it is not proposed without a GPU."""
    condition: str = ""
    """Sizes at which the new code takes another path, as ``K % BLOCK_K == 0``: verification covers both."""

    fallback_for: str = ""
    """Title of the proposal that this one replaces if it fails; empty for none."""
    follows: str = ""
    """Title of the proposal that this one extends if its launch hides a faster kernel; empty for none."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity of the change, wherever its lines are."""
        return self.name, self.kernel, self.title

    def applied(self, text: bytes) -> bytes:
        """The text with the edits."""
        for edit in sorted(self.edits, key=lambda edit: edit.start, reverse=True):
            text = text[: edit.start] + edit.new.encode() + text[edit.end :]
        return text


class SourceAction(Protocol):
    """Proposes edits of one kind."""

    def __call__(self, facts: Facts) -> Iterator[Proposal]:
        """The legal edits of one kernel."""


# Reading -------------------------------------------------------------------------------------------------------------


def call_pointer(call: Node) -> Node | None:
    """The first argument of an access."""
    arguments = field(call, "arguments")
    positional = (
        [i for i in arguments.named_children if i.type not in ("keyword_argument", "comment")] if arguments else []
    )
    return positional[0] if positional else None


def statement_of(node: Node, root: Node) -> Node | None:
    """The statement of a block that contains a node; None for a node outside ``root``."""
    for block in walk(root):
        if block.type == "block" or block == root:
            for child in block.named_children:
                if child.type in SIMPLE and child.start_byte <= node.start_byte and node.end_byte <= child.end_byte:
                    return child
    return None


def assignment_of(statement: Node) -> tuple[Node, Node] | None:
    """The name and the value of ``name = value``; None for other statements."""
    node = (
        statement.named_children[0] if statement.type == "expression_statement" and statement.named_children else None
    )
    left, right = field(node, "left"), field(node, "right")
    if node is None or node.type != "assignment" or left is None or right is None or left.type != "identifier":
        return None
    return left, right


def assigned_in(node: Node) -> set[str]:
    """Names that statements below a node assign, loop variables included."""
    names: set[str] = set()
    for item in walk(node):
        if item.type in ("assignment", "augmented_assignment", "for_statement", "named_expression"):
            left = field(item, "left") or field(item, "name")
            names |= {text_of(part) for part in walk(left) if part.type == "identifier"} if left is not None else set()
    return names


def loops_of(site: Site) -> list[Node]:
    """The ``for`` loops of a kernel, outermost first."""
    return [node for node in walk(site.kernel.body) if node.type == "for_statement"]


def indent_at(text: bytes, node: Node) -> str:
    """The white space before the line of a node."""
    line = text[line_start(text, node.start_byte) : node.start_byte]
    return line[: len(line) - len(line.lstrip())].decode()


def before(text: bytes, node: Node, line: str) -> Edit:
    """The edit that inserts a line above the line of a node, with its indentation."""
    start = line_start(text, node.start_byte)
    return Edit(start, start, f"{indent_at(text, node)}{line}\n")


def after(text: bytes, node: Node, line: str) -> Edit:
    """The edit that inserts a line below the line on which a node ends."""
    end = text.find(b"\n", node.end_byte)
    end = len(text) if end < 0 else end + 1
    return Edit(end, end, f"{indent_at(text, node)}{line}\n")


def language_of(facts: Facts) -> str:
    """``triton.language`` as the kernel names it, usually ``tl``."""
    heads = (text_of(field(call, "function")).rpartition(".")[0] for _, call in facts.site.kernel.calls)
    return next(filter(None, heads), "tl")


def uses(node: Node) -> set[str]:
    """Names that an expression reads."""
    return set(names_in(node))


def all_launches(sites: Sequence[Site]) -> list[Launch]:
    """The launches of several kernels."""
    return [launch for site in sites for launch in site.launches]
