"""Records what a sample of programs stores, to compare only that. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mtmc_lsp.verify.worker.interpreter.hidden_mode import HiddenMode

Range = tuple[int, int]
"""The first address, and the one after the last."""
READ_LATER = "other code reads memory that the programs left out would write"
ATOMICS = "its programs add to memory of others"


class Stores(HiddenMode):
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
        self.unread = ""
        """Which elements no program of a launch loads, judged by those that ran; empty if they may load all."""
        self._names: dict[Range, str] = {}
        self._loaded: dict[Range, Any] = {}
        """How many elements of an argument the current program loaded; an array if several programs run at once."""
        self._most_loaded: dict[Range, int] = {}
        """The largest such numbers of the current launch."""
        self._partial: list[Range] = []
        """Memory that launches wrote in part."""
        self._arguments: list[torch.Tensor] = []
        self._stored: list[Any] = []
        """The addresses that each store of the current launch wrote."""
        self._all: list[Any] = []
        self._of_program: Any = 0
        """How many elements the current program stored; an array if several programs run at once."""
        self._most = 0
        """The largest such number of the current launch."""

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """A launch with these arguments begins; without their names, it has positions instead."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        self._arguments, self._names = list(tensors.values()), {_memory(value): name for name, value in tensors.items()}
        self._stored, self.has_atomics, self._most, self._of_program = [], False, 0, 0
        self._loaded, self._most_loaded = {}, {}

    def begin_program(self) -> None:
        """The next program of the launch begins."""
        self._most, self._of_program = self._most_stored, 0
        self._end_loads()

    @property
    def _most_stored(self) -> int:
        import numpy

        return max(self._most, int(numpy.max(self._of_program)))

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
        self._note_unread(name, total)
        self._partial += [memory for tensor in self._arguments if self._is_stored(memory := _memory(tensor))]

    def may_be_complete(self, total: int) -> bool:
        """Whether ``total`` programs can fill the memory that this launch writes, if no program writes more than those so far.

        If they cannot, elements may be left out, which only all programs show.
        """
        memories = {_memory(t): t.element_size() for t in self._arguments if self._is_stored(_memory(t))}
        elements = sum((end - start) // size for (start, end), size in memories.items())
        return bool(self._most_stored * total >= elements)

    def stored(self, addresses: Any, mask: Any, counts: Any = None) -> None:
        """A program stores to these addresses; or several programs at once, each as many elements as ``counts`` has."""
        written = addresses[mask]
        self._of_program = self._of_program + (written.size if counts is None else counts)
        self._stored.append(written)

    def loaded(self, addresses: Any, mask: Any, counts: Any = None) -> None:
        """A program loads from these addresses; or several programs at once, each as many elements as ``counts`` has."""
        loaded = addresses[mask]
        # A load has addresses in one tensor.
        first = loaded.flat[0] if loaded.size else 0
        for memory in self._names:
            if memory[0] <= first < memory[1]:
                self._loaded[memory] = self._loaded.get(memory, 0) + (loaded.size if counts is None else counts)
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

    def _end_loads(self) -> None:
        import numpy

        for memory, count in self._loaded.items():
            self._most_loaded[memory] = max(int(numpy.max(count)), self._most_loaded.get(memory, 0))
        self._loaded = {}

    def _note_unread(self, name: str, total: int) -> None:
        """Note which arguments have more elements than ``total`` programs load, if none loads more than those that ran."""
        self._end_loads()
        for tensor in self._arguments:
            most = total * self._most_loaded.get(_memory(tensor), 0)
            if 0 < most < tensor.numel() and not self._is_stored(_memory(tensor)):
                self.unread = (
                    f"the {total} programs of {name} load at most {most} "
                    f"of the {tensor.numel()} elements of {self._names[_memory(tensor)]}"
                )

    def _is_stored(self, memory: Range) -> bool:
        start, end = memory
        return any(bool(((stored >= start) & (stored < end)).any()) for stored in self._stored)


def _memory(tensor: torch.Tensor) -> Range:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
