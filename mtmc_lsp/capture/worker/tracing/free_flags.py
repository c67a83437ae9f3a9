"""Finds flags that do not influence a target: it is traced again with other flags, and the graphs are compared.

A dropout with p = 0 reads ``training``, and so does attention with ``dropout_p=self.p if self.training else 0.0``; the graph is
the same in both modes. Only modes of the user's modules and boolean arguments are tried: they differ between calls of a program,
while other attributes are set by the constructor. What torch's modules read is known without a trace, see
:mod:`mtmc_lsp.capture.worker.modules.irrelevant_values`. Runs in workers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtmc_lsp.capture.accesses import STORES
from mtmc_lsp.capture.worker.calls import Call
from mtmc_lsp.capture.worker.modules.members import access_of
from mtmc_lsp.capture.worker.side_effects import AttributeUses, is_random, recording_attribute_uses
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.graph import Graph

MODE = "training"
MAX_GROUPS = 3
"""Limit for the flags that are tried, since every combination of free flags is traced."""
MAX_NODES = 50
"""Limit for the nodes of a graph whose flags are tried. A trace of a network, as of ViT-B, takes 3.4 s of processor time."""
MAX_TRACED_NODES = 1000
"""Limit for the nodes of all these traces."""


@dataclass(frozen=True)
class FreeFlags:
    """Flags with which the graph is the same."""

    modes: tuple[str, ...] = ()
    """Accesses of modes that may change together."""
    arguments: tuple[str, ...] = ()
    """Paths of boolean arguments."""

    @property
    def equal_modes(self) -> tuple[tuple[str, str], ...]:
        """Pairs of modes that must be equal: only changes of all of them were traced."""
        return tuple((mode, self.modes[0]) for mode in self.modes[1:])


def free_flags(
    call: Call,
    uses: AttributeUses,
    first: Callable[[], Graph],
    returned: Sequence[str],
    path: str,
    trace: Callable[[Call], Graph],
    run: Callable[[Call], tuple[Sequence[str], bool]],
) -> FreeFlags:
    """The flags that do not matter. What the other traces read is added to ``uses``: the graph is valid only for these values.

    Args:
        uses: what the call itself uses.
        first: the result of ``trace`` for the call itself.
        returned: for each result of the call itself the name of the input that it is, or an empty string.
        path: the user's file.
        trace: the graph of a call.
        run: like ``returned``, for any call, and whether it draws random numbers. It takes much less time than a trace.
    """
    modes = tuple(access for access in uses.reads if access.endswith(f".{MODE}") and _is_mode_of_user(call, access))
    flags = [name for name, value in zip(call.names, call.values, strict=True) if isinstance(value, bool)]
    groups = [*([modes] if modes else []), *((name,) for name in flags)][:MAX_GROUPS]
    if not groups:
        return FreeFlags()
    graph, returned = _comparable(first()), list(returned)
    draws = any(is_random(node.op) for node in graph.nodes)
    free: list[tuple[str, ...]] = []
    traces_left = MAX_TRACED_NODES // max(1, len(graph.nodes))

    def is_same(changed: frozenset[str]) -> bool:
        nonlocal traces_left
        if not traces_left:
            return False
        traces_left -= 1
        modules = [_owner(call, access) for access in changed if access in modes]
        values = [not v if name in changed else v for name, v in zip(call.names, call.values, strict=True)]
        other_call = replace(call, values=tuple(values))
        try:
            with _restored(call), _in_other_mode(modules), recording_attribute_uses(call.instance, path) as other:
                other_returned, other_draws = run(other_call)
                # Dropout in training mode: no trace is needed.
                if list(other_returned) != returned or (other_draws and not draws):
                    return False
                if _comparable(trace(other_call)) != graph:
                    return False
        except MtmcError:  # the target does not accept the other flags
            return False
        if other.writes.keys() - uses.writes.keys():
            return False
        uses.reads |= {access: value for access, value in other.reads.items() if access not in uses.reads}
        uses.called |= other.called
        uses.tensors |= other.tensors
        return True

    for group in groups:
        # By induction, the graph is the same for all combinations of the free groups.
        if all(is_same(frozenset((*group, *combination))) for combination in _combinations(free)):
            free.append(group)
    return FreeFlags(modes if modes in free else (), tuple(name for name in flags if (name,) in free))


def _combinations(groups: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """All unions of some of the groups, beginning with none."""
    for count in range(len(groups) + 1):
        for chosen in itertools.combinations(groups, count):
            yield tuple(itertools.chain.from_iterable(chosen))


def _comparable(graph: Graph) -> Graph:
    """The graph without its relation to lines of the user's file."""
    return replace(graph, nodes=tuple(replace(node, line=0, variable="") for node in graph.nodes))


def _is_mode_of_user(call: Call, access: str) -> bool:
    module = _owner(call, access)
    return isinstance(module.training, bool) and not type(module).__module__.startswith("torch.")


def _owner(call: Call, access: str) -> Any:
    assert call.instance is not None
    modules = {access_of(call.instance, name): module for name, module in call.instance.named_modules()}
    return modules[access.removesuffix(f".{MODE}")]


@contextlib.contextmanager
def _restored(call: Call) -> Iterator[None]:
    """Undo assignments to attributes of the call's module: in another mode, the target may keep state."""
    holders = [module.__dict__ for module in call.instance.modules()] if call.instance is not None else []
    holders += [attributes[name] for attributes in holders for name in STORES]
    before = [dict(holder) for holder in holders]
    try:
        yield
    finally:
        for holder, values in zip(holders, before, strict=True):
            holder.clear()
            holder.update(values)


@contextlib.contextmanager
def _in_other_mode(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """The modules alone, without their children, in the other mode."""
    try:
        for module in modules:
            module.training = not module.training
        yield
    finally:
        for module in modules:
            module.training = not module.training
