"""Records what a sample of programs stores, to compare only that. Runs in workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Range = tuple[int, int]
"""The first address, and the one after the last."""
READ_LATER = "other code reads memory that the programs left out would write"
ATOMICS = "its programs add to memory of others"


class Stores(TorchDispatchMode):  # type: ignore[misc]
    """Addresses that the programs of a call stored to; as a context, it sees which tensors torch reads."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[str, int, int]] = []
        """For each launch the kernel's name, how many programs ran, and how many there are."""
        self.seconds = 0.0
        """Processor time of all programs."""
        self.has_atomics = False
        """Whether a program of the current launch uses atomic operations."""
        self.reason = ""
        """Why the stored values cannot be compared; empty if they can."""
        self._partial: list[Range] = []
        """Memory that launches wrote in part."""
        self._arguments: list[torch.Tensor] = []
        self._stored: list[Any] = []
        """The addresses that each store of the current launch wrote."""
        self._all: list[Any] = []
        self._of_program = 0
        """How many elements the current program stored."""
        self._most = 0
        """The largest such number of the current launch."""

    def begin(self, arguments: Iterable[Any]) -> None:
        """A launch with these arguments begins."""
        self._arguments = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        self._stored, self.has_atomics, self._most, self._of_program = [], False, 0, 0

    def begin_program(self) -> None:
        """The next program of the launch begins."""
        self._most, self._of_program = max(self._most, self._of_program), 0

    @property
    def is_partial(self) -> bool:
        """Whether programs were left out so far."""
        return any(ran < total for _, ran, total in self.launches)

    def end(self, name: str, ran: int, total: int, seconds: float) -> None:
        """The launch ended.

        Args:
            ran: the number of programs that ran, of ``total``.
            seconds: their processor time.
        """
        self.launches.append((name, ran, total))
        self.seconds += seconds
        self._all += self._stored
        if ran == total:
            return
        if self.has_atomics:
            self.reason = ATOMICS
        self._partial += [memory for tensor in self._arguments if self._is_stored(memory := _memory(tensor))]

    def may_be_complete(self, total: int) -> bool:
        """Whether ``total`` programs can fill the memory that this launch writes, if no program writes more than those so far.

        If they cannot, elements may be left out, which only all programs show.
        """
        memories = {_memory(t): t.element_size() for t in self._arguments if self._is_stored(_memory(t))}
        elements = sum((end - start) // size for (start, end), size in memories.items())
        return bool(max(self._most, self._of_program) * total >= elements)

    def stored(self, addresses: Any, mask: Any) -> None:
        """A program stores to these addresses."""
        written = addresses[mask]
        self._of_program += written.size
        self._stored.append(written)

    def loaded(self, addresses: Any, mask: Any) -> None:
        """A program loads from these addresses."""
        for start, end in self._partial if not self.reason else ():
            if (mask & (addresses >= start) & (addresses < end)).any():
                self.reason = READ_LATER

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [result.alias_info for result in func._schema.returns if result.alias_info is not None]
        is_view = aliases and not any(alias.is_write for alias in aliases)
        if self._partial and not self.reason and not is_view:
            tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            if any(_memory(tensor) in self._partial for tensor in tensors):
                self.reason = READ_LATER
        return func(*args, **(kwargs or {}))

    def mask(self, result: Any) -> torch.Tensor | None:
        """Which elements of a result were stored; ``None`` if all programs that write it ran."""
        if not isinstance(result, torch.Tensor) or _memory(result) not in self._partial:
            return None
        import numpy

        start, end = _memory(result)
        size = result.element_size()
        flat = numpy.zeros((end - start) // size, dtype=numpy.bool_)
        for addresses in self._all:
            here = addresses[(addresses >= start) & (addresses < end)]
            flat[(here - numpy.uint64(start)) // numpy.uint64(size)] = True
        stored = torch.from_numpy(flat)
        return stored.as_strided(result.size(), result.stride(), result.storage_offset()).clone()

    def _is_stored(self, memory: Range) -> bool:
        start, end = memory
        return any(bool(((stored >= start) & (stored < end)).any()) for stored in self._stored)


def _memory(tensor: torch.Tensor) -> Range:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
