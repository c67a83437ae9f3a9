"""One trace of the body of a kept loop: symbols for its state, reads and writes at the number of the iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from mtmc_lsp.capture.worker.loops.gradients import Ends, RowLeaf, leave_with_gradients, without_gradients
from mtmc_lsp.capture.worker.loops.iteration import Changing, NeedsPeeling, NotKept, Span, Step
from mtmc_lsp.capture.worker.loops.lists import Collected
from mtmc_lsp.capture.worker.loops.markers import operators
from mtmc_lsp.capture.worker.loops.products import (
    compared_gather,
    compared_position,
    elementwise_product,
    padded_by_dimension,
    selected_parts,
    vector_product,
)
from mtmc_lsp.capture.worker.loops.sequences import Sequences, Watched, indexed
from mtmc_lsp.capture.worker.loops.states.records import flattened, unflattened
from mtmc_lsp.capture.worker.loops.tensors import (
    FACTORIES,
    WITHOUT_VALUES,
    converted,
    has_step,
    is_alike,
    is_differentiable,
    iterations_between,
    located,
    number_argument,
    storage_of,
    targets,
    window_of,
    without_tensors,
    zeros,
)

Key = tuple[object, ...]


@dataclass
class Slot:
    """A tensor that iterations carry to the next one."""

    number: int
    initial: torch.Tensor
    symbol: torch.Tensor
    """Its value at the beginning of an iteration."""
    leaf: torch.Tensor
    """The symbol as a leaf for autograd."""
    name: str
    next: Any = None


@dataclass(frozen=True)
class Write:
    """The slice of a tensor that an iteration writes."""

    tensor: torch.Tensor
    dim: int
    step: Step
    row: torch.Tensor | None
    """Length 1 along ``dim``; ``None`` if the body has not written it yet."""


@dataclass(frozen=True)
class Item:
    """What an iteration appends to a list."""

    list: list[Any]
    value: torch.Tensor
    at_front: bool


class Body(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """A trace of the body. Each trace knows from the one before what the body carries and writes."""

    def __init__(self, span: Span, before: Body | None) -> None:
        super().__init__()
        self.span = span
        self.slots: dict[Key, Slot] = {}
        self._known_increments = 0
        self.items: dict[str, Item] = {}
        self._initial: dict[Key, torch.Tensor] = dict(before._initial) if before else {}
        """States that begin as another tensor than the variable holds: converted numbers, other shapes and dtypes."""
        self._increments: dict[Key, int] = dict(before._increments) if before else {}
        """Integers that grow by a constant."""
        self._numbers: set[Key] = set(before._numbers) if before else set()
        """Floats that change otherwise, which are float64 scalars."""
        if before is not None and len(before._increments) > before._known_increments:
            # A number that changes was a constant in that trace, so what it read and wrote is not valid.
            before = None
        self._known_increments = len(self._increments)
        self._changed: dict[int, torch.Tensor] = dict(before._changed) if before else {}
        """Tensors from outside the body that it changes in place, by storage."""
        self._written: dict[int, Write] = {}
        if before:
            self._written = {key: replace(write, row=None) for key, write in before._written.items()}
        self._delayed: dict[Key, torch.Tensor] = dict(before._delayed) if before else {}
        """Reads of what earlier iterations wrote, by tensor and distance, with the values before the loop."""
        self._is_settled = True
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._entered: dict[str, tuple[list[Any], Any]] = {}
        self._left: dict[str, tuple[list[Any], Any]] = {}
        self._outside: dict[int, torch.Tensor] = {}
        self._local: dict[int, list[torch.Tensor]] = {}
        self._used: set[int] = set()
        self._mutated: set[int] = set()
        self._open_reads: dict[int, tuple[torch.Tensor, int, Step]] = {}
        """Reads that the body changed in place and has not written back."""
        self._reads: dict[int, tuple[torch.Tensor, int, Step]] = {}
        self._sequences = Sequences(span)
        self._is_trained = torch.is_grad_enabled()
        self._row_leaves: list[RowLeaf] = []
        self._same: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors from outside that need a gradient, each with its leaf."""

    # Beginning and end of an iteration ---------------------------------------------------------------------------

    def enter(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The variables at the beginning of an iteration, from those before the loop."""
        result = {}
        tensors = (leaf for value in values.values() for leaf in flattened(value)[0] if isinstance(leaf, torch.Tensor))
        self._device = next((tensor.device for tensor in tensors), torch.empty(()).device)
        for name, value in values.items():
            leaves, spec = flattened(value)
            entered = [self._symbol_of((name, i), leaf) for i, leaf in enumerate(leaves)]
            self._entered[name] = entered, spec
            result[name] = unflattened(entered, spec)
        for storage, tensor in self._changed.items():
            symbol = self._slot(("changed", storage), tensor.clone()).symbol
            tensor.copy_(symbol)
        for key, initial in self._delayed.items():
            self._slot(key, initial)
        return result

    def _symbol_of(self, key: Key, leaf: Any) -> Any:
        if key in self._increments:
            return Step(self.span, leaf, self._increments[key])
        if key in self._numbers:
            with without_gradients():
                scalar = torch.full((), leaf, dtype=torch.float64, device=self._device)
            symbol = self._slot(key, scalar).symbol
            return Changing(self.span, lambda _: symbol)
        initial = self._initial.get(key, leaf)
        return self._slot(key, initial).symbol if isinstance(initial, torch.Tensor) else leaf

    def _slot(self, key: Key, initial: torch.Tensor) -> Slot:
        number = len(self.slots)
        name = str(key[0]) if key[0] not in ("changed", "delayed") else "state" if key[0] == "changed" else "earlier"
        with without_gradients():
            leaf = operators().enter(initial, self.span.loop, number, name)
        symbol = leaf
        if self._is_trained and is_differentiable(leaf):
            # The user's code may change its state in place, and autograd's leaves may not be.
            symbol = leaf.requires_grad_().clone()
        self._keep(symbol)
        self.slots[key] = Slot(number, initial, symbol, leaf, name)
        return self.slots[key]

    def leave(self, values: Mapping[str, Any]) -> None:
        """Note the variables at the end of the iteration."""
        self._left = {name: flattened(value) for name, value in values.items()}
        if self._open_reads:
            raise NotKept("it changes a view of a tensor in place")
        for key, tensor in self._changed.items():
            slot = self.slots.get(("changed", key))
            if slot is not None:
                slot.next = tensor.clone()
        for tensor, saved in self._saved:
            tensor.copy_(saved)

    def unsettle(self) -> None:
        """Let the body be traced once more."""
        self._is_settled = False

    def is_settled(self) -> bool:
        """Whether this trace is valid for all iterations. If not, the next one knows more."""
        for name, (leaves, spec) in self._left.items():
            entered, entered_spec = self._entered.get(name, (None, None))
            if entered is None:
                continue
            if spec != entered_spec:
                raise NeedsPeeling("first")
            for i, (before, after) in enumerate(zip(entered, leaves, strict=True)):
                self._settle((name, i), before, after)
        for key in self._delayed:
            if key not in self.slots:
                self._is_settled = False
        return self._is_settled

    def _settle(self, key: Key, before: Any, after: Any) -> None:
        if isinstance(after, torch.Tensor):
            slot = self.slots.get(key)
            if slot is None:
                if not isinstance(before, (int, float)):
                    raise NeedsPeeling("first")
                self._initial[key] = torch.full(after.shape, before, dtype=after.dtype, device=after.device)
                self._is_settled = False
                return
            slot.next = after
            if self._is_used(slot.symbol, key) and not is_alike(slot.symbol, after):
                self._initial[key] = converted(slot.initial, after)
                self._is_settled = False
        elif key in self._numbers:
            slot = self.slots[key]
            if not isinstance(after, (float, Changing)):
                raise NotKept("a number of it becomes another kind of object")
            number = after.tensor(slot.symbol) if isinstance(after, Changing) else torch.full_like(slot.symbol, after)
            slot.next = number.to(torch.float64)
        elif type(before) in (int, float) and (type(after) is Changing or (type(after) is float and after != before)):
            self._numbers.add(key)
            self._is_settled = False
        elif isinstance(before, Step):
            if not (isinstance(after, Step) and after.same(before + before.step)):
                raise NotKept("a number of it changes irregularly")
        elif type(before) is int and type(after) is int:
            if before != after:
                self._increments[key] = after - before
                self._is_settled = False
        elif before is not after and not (type(before) is type(after) and before == after):
            raise NeedsPeeling("first")

    def _is_used(self, symbol: torch.Tensor, key: Key) -> bool:
        others = (leaf for name, (leaves, _) in self._left.items() for i, leaf in enumerate(leaves) if (name, i) != key)
        return id(symbol) in self._used or any(leaf is symbol for leaf in others)

    # After the loop ----------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """Emit the end of the loop. Returns the variables after it."""
        for key, slot in self.slots.items():
            if key[0] == "delayed":
                slot.next = self._next_of_delayed(key)
        states = [slot.next for slot in self.slots.values()]
        initial = [slot.initial for slot in self.slots.values()]
        last: dict[Key, int] = {}
        for name, (leaves, _) in self._left.items():
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor) and (name, i) not in self.slots:
                    last[name, i] = len(states)
                    states.append(leaf)
                    initial.append(zeros(leaf))
        for key, slot in self.slots.items():
            last[key] = slot.number
            if not is_alike(slot.next, slot.initial):
                # Nothing reads it at the beginning of an iteration.
                initial[slot.number] = zeros(slot.next)
        writes = [write for write in self._written.values() if write.row is not None]
        slots = list(self.slots.values())
        further = [None] * (len(states) - len(slots))
        ends = Ends(
            self.span,
            [slot.name for slot in slots] + ["last"] * len(further),
            [*(slot.leaf for slot in slots), *further],
            states,
            initial,
            [write.row for write in writes if write.row is not None],
            [write.tensor for write in writes],
            [item.value for item in self.items.values()],
            [write.dim for write in writes],
            [write.step for write in writes],
            [self._is_used(slot.symbol, key) for key, slot in self.slots.items()] + [False] * len(further),
        )
        results = leave_with_gradients(ends, self._row_leaves, list(self._same.values()))
        for write, result in zip(writes, results[len(states) :], strict=False):
            write.tensor.copy_(result)
        for storage, tensor in self._changed.items():
            tensor.copy_(results[last["changed", storage]])
        items = results[len(states) + len(writes) :]
        self.collected = {
            name: Collected(item.list, value, at_front=item.at_front)
            for (name, item), value in zip(self.items.items(), items, strict=True)
        }
        return {name: self._final(name, leaves, spec, results, last) for name, (leaves, spec) in self._left.items()}

    def _final(self, name: str, leaves: list[Any], spec: Any, results: Any, last: Mapping[Key, int]) -> Any:
        finals = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Step):
                finals.append(leaf.last)
                continue
            if isinstance(leaf, Changing):
                # Another number than the trace knows: any use of it is refused.
                finals.append(leaf)
                continue
            if not isinstance(leaf, torch.Tensor):
                finals.append(leaf)
                continue
            value, slot = results[last[name, i]], self.slots.get((name, i))
            if slot is not None and storage_of(slot.symbol) in self._mutated:
                # The user's code changes the tensor from before the loop in place.
                if leaf is not slot.symbol or (name, i) in self._initial:
                    raise NotKept("it changes a tensor in place and replaces it, too")
                value = slot.initial.copy_(value)
            finals.append(value)
        return unflattened(finals, spec)

    def _next_of_delayed(self, key: Key) -> torch.Tensor:
        _, storage, distance = key
        assert isinstance(storage, int) and isinstance(distance, int)
        if distance > 1:
            return self.slots["delayed", storage, distance - 1].symbol
        row = self._written[storage].row
        assert row is not None
        return row

    # Torch calls in the body -------------------------------------------------------------------------------------

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        function = WITHOUT_VALUES.get(function, function)
        if function is torch.Tensor.__getitem__ and has_step(args[1]):
            return self._read(*args)
        if function is torch.Tensor.__setitem__ and has_step(args[1]):
            return self._write(*args)
        if function in (torch.select, torch.Tensor.select) and len(args) == 3 and isinstance(args[2], Step):
            return self._read(args[0], (slice(None),) * (args[1] % args[0].dim()) + (args[2],))
        if function in FACTORIES and (number := number_argument(function, args)) is not None:
            return self._filled(function, args, kwargs, number)
        leaves = tree_leaves((args, kwargs))
        tensors = [item for item in leaves if isinstance(item, torch.Tensor)]
        numbers = [item for item in leaves if isinstance(item, Changing)]
        is_sequence = all(map(self._is_known_before, tensors))
        is_changing = bool(numbers) or any(item in self._sequences for item in tensors)
        given = args, kwargs
        if numbers:
            if not tensors:
                raise NotKept("a function of the number of the iteration has no tensor")
            args, kwargs = tree_map(
                lambda item: self._scalar(item, tensors) if isinstance(item, Changing) else item, (args, kwargs)
            )
        for tensor in tensors:
            self._note(tensor)
        if self._is_trained:
            args, kwargs = tree_map(self._leaf, (args, kwargs))
        changed = list(targets(function, args, kwargs))
        for tensor in changed:
            self._prepare_change(tensor)
            self._sequences.forget(storage_of(tensor), storage_of)
        watched = Watched()
        product: Any = padded_by_dimension(function, args, kwargs)
        if product is None and not kwargs:
            product = vector_product(function, args)
        if product is None and not kwargs:
            product = elementwise_product(function, args)
        if product is None and not is_sequence:
            product = selected_parts(function, args, kwargs)
        if product is None and not is_sequence and not kwargs:
            product = compared_gather(function, args)
        if product is None and not is_sequence:
            product = compared_position(function, args, kwargs)
        result = product if product is not None else function(*args, **kwargs)
        computed = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        if computed and any(storage_of(tensor) in self._written for tensor in tensors):
            raise NotKept("it reads all of a tensor that it writes slice by slice")
        if computed and not changed and is_sequence and is_changing:
            self._sequences.add_call(function, *given, result)
            if watched.leaves_loop():
                result = self._rows_of_all_iterations(result)
                computed = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        for item in computed:
            if storage_of(item) not in self._outside:
                self._keep(item)
        return result

    def _leaf(self, item: Any) -> Any:
        """A tensor from outside as a leaf, whose gradient is the sum over all iterations."""
        if not isinstance(item, torch.Tensor) or not item.requires_grad or storage_of(item) in self._local:
            return item
        if id(item) not in self._same:
            self._same[id(item)] = item, item.detach().requires_grad_()
        return self._same[id(item)][1]

    def _is_known_before(self, tensor: torch.Tensor) -> bool:
        """Whether a value depends on no state, so that it can be computed before the loop."""
        key = storage_of(tensor)
        if tensor in self._sequences:
            return True
        return key not in self._local and key not in self._changed and key not in self._written

    def _rows_of_all_iterations(self, result: Any) -> Any:
        """A result that is computed for all iterations before the loop, as the body reads it."""
        leaves, spec = tree_flatten(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rows = {}
        for value, sequence in zip(tensors, self._sequences.all_iterations(tensors), strict=True):
            step = Step(self.span, 0, 1)
            row = self._read_row(sequence, 0, step)
            row = row.squeeze(0) if self._is_trained else row.select(0, 0)
            self._outside.setdefault(storage_of(sequence), sequence)
            self._sequences.add_row(row, sequence, 0, step, (0,))
            rows[id(value)] = row
        return tree_unflatten([rows.get(id(leaf), leaf) for leaf in leaves], spec)

    def _scalar(self, number: Changing, others: Sequence[torch.Tensor]) -> torch.Tensor:
        value = number.tensor(others[0])
        kinds = [tensor.dtype for tensor in others if tensor.dtype.is_floating_point]
        if value.dtype is torch.float64 and kinds and not any(tensor.dim() for tensor in others):
            # Python's numbers do not widen the dtype of a scalar tensor.
            value = value.to(reduce(torch.promote_types, kinds))
        self._keep(value)
        return value

    def _filled(self, function: Any, args: Any, kwargs: Any, number: Changing) -> torch.Tensor:
        """``torch.tensor(t)`` or ``torch.full(shape, t)``."""
        like = torch.empty((), device=kwargs.get("device"))
        dtype = kwargs.get("dtype") or (torch.int64 if number.is_whole else torch.get_default_dtype())
        value = self._scalar(number, (like,)).to(dtype)
        if function is torch.full:
            value = value.expand(args[0] if isinstance(args[0], (tuple, list)) else (args[0],)).clone()
        self._keep(value)
        return value

    def _keep(self, tensor: torch.Tensor) -> None:
        # Holding the tensor keeps its storage, so that no other one gets the same key.
        self._local.setdefault(storage_of(tensor), []).append(tensor)

    def _note(self, tensor: torch.Tensor) -> None:
        self._used.add(id(tensor))
        key = storage_of(tensor)
        if key not in self._local:
            self._outside.setdefault(key, tensor)

    def _prepare_change(self, tensor: torch.Tensor) -> None:
        key = storage_of(tensor)
        if key in self._local:
            self._mutated.add(key)
            if key in self._reads:
                self._open_reads[key] = self._reads[key]
            return
        outer = self._outside[key]
        if self._is_trained:
            raise NotKept("it changes a tensor in place, and its gradient is computed")
        if key not in self._changed:
            self._saved.append((outer, outer.clone()))
            self._changed[key] = outer
            self._is_settled = False

    # Reads and writes at the number of the iteration ---------------------------------------------------------------

    def _read(self, source: torch.Tensor, index: Any) -> torch.Tensor:
        if (window := window_of(index)) is not None:
            indices, dim = window
            rows = [self._read(source, item) for item in indices]
            joined: torch.Tensor = self.__torch_function__(torch.cat, (), (rows, dim))
            return joined
        index, indices = without_tensors(index)
        dim, step, rest = located(self.span, source, index)
        row = self._row(source, dim, step)
        value = indexed(row, dim, rest) if self._is_trained else row[rest]
        self._keep(value)
        self._reads[storage_of(value)] = source, dim, step
        if self._is_known_before(source) and storage_of(source) not in self._local:
            self._sequences.add_row(value, source, dim, step, rest)
        if indices is not None:
            # As in eager mode, numbers select before tensors index.
            return self.__torch_function__(torch.Tensor.__getitem__, (), (value, indices))
        return value

    def _row(self, source: torch.Tensor, dim: int, step: Step) -> torch.Tensor:
        """The slice of length 1 that an iteration reads."""
        key = storage_of(source)
        if key in self._local:
            raise NotKept("it reads an intermediate value at the number of the iteration")
        self._outside.setdefault(key, source)
        write = self._written.get(key)
        if write is not None and dim == write.dim:
            if step.same(write.step):
                if write.row is not None:
                    return write.row
            elif (distance := iterations_between(step, write.step)) > 0:
                return self._earlier(source, key, dim, step, write, distance)
            elif distance == 0:
                raise NotKept("it reads and writes a tensor at unrelated positions")
        elif write is not None:
            raise NotKept("it reads and writes a tensor along different dimensions")
        return self._read_row(source, dim, step)

    def _read_row(self, source: torch.Tensor, dim: int, step: Step) -> torch.Tensor:
        """The slice of a tensor that is the same in all iterations."""
        for read in self._row_leaves:
            if read.source is source and read.dim == dim and read.step.same(step):
                return read.leaf
        with without_gradients():
            row: torch.Tensor = operators().read(source, self.span.loop, dim, step.first, step.step)
        self._keep(row)
        if self._is_trained and source.requires_grad:
            self._row_leaves.append(RowLeaf(source, dim, step, row.requires_grad_()))
        return row

    def _earlier(
        self, source: torch.Tensor, key: int, dim: int, step: Step, write: Write, distance: int
    ) -> torch.Tensor:
        for number in range(1, distance + 1):
            if ("delayed", key, number) not in self._delayed:
                position = write.step.first - number * write.step.step
                self._delayed["delayed", key, number] = source.narrow(dim, position, 1).clone()
                self._is_settled = False
        slot = self.slots.get(("delayed", key, distance))
        if slot is None:
            return self._delayed["delayed", key, distance]
        self._used.add(id(slot.symbol))
        return slot.symbol

    def _write(self, target: torch.Tensor, index: Any, value: Any) -> None:
        dim, step, rest = located(self.span, target, index)
        key = storage_of(target)
        if key in self._local:
            raise NotKept("it writes an intermediate value at the number of the iteration")
        if key in self._changed:
            raise NotKept("it changes a tensor in place and writes a slice of it, too")
        before = self._written.get(key)
        if before is not None and not (before.dim == dim and before.step.same(step) and before.tensor is target):
            raise NotKept("it writes several slices of one tensor")
        if before is None:
            # What the body read of it before this statement may have been written by an earlier iteration.
            self._is_settled = self._is_settled and key not in self._outside
            self._written[key] = Write(target, dim, step, None)
            self._outside.setdefault(key, target)
        if isinstance(value, Changing):
            value = value.tensor(target)
        if isinstance(value, torch.Tensor):
            self._used.add(id(value))
            if self._open_reads.get(storage_of(value), (None, 0, step))[0] is target:
                del self._open_reads[storage_of(value)]
        shape = [1 if d == dim else size for d, size in enumerate(target.shape)]
        if all(item == slice(None) or (d == dim and item == 0) for d, item in enumerate(rest)):
            slot = shape if rest[dim] == slice(None) else [size for d, size in enumerate(shape) if d != dim]
            if not isinstance(value, torch.Tensor):
                row = torch.full(slot, value, dtype=target.dtype, device=target.device)
            else:
                row = value.to(target.dtype).expand(slot)
            row = row if rest[dim] == slice(None) else row.unsqueeze(dim)
        else:
            row = self._row(target, dim, step).clone()
            row[tuple(rest)] = value
        self._keep(row)
        self._written[key] = Write(target, dim, step, row)

    def append(self, name: str, items: list[Any], value: Any, *, at_front: bool) -> None:
        """Note what the iteration appends to a list."""
        if name in self.items or not isinstance(items, list) or not isinstance(value, torch.Tensor):
            raise NotKept("it appends several items, or none that is a tensor")
        self._used.add(id(value))
        self.items[name] = Item(items, value, at_front)
