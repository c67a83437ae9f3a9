"""One run of the body of a nest: which values it reads at the numbers of the iterations, computes from them, and writes.

The tensors of this run have the shapes of one cell and no meaning. The calls run again on all cells of a diagonal at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from mtmc_lsp.capture.worker.loops.iteration import Changing, NotKept, Span, Step
from mtmc_lsp.capture.worker.loops.nests.conditions import Path
from mtmc_lsp.capture.worker.loops.tensors import FACTORIES, IN_PLACE, has_step, number_argument, storage_of, targets

LIKE = frozenset("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split())
"""Functions that take the shape of a tensor and not its values."""
RANDOM = frozenset("rand randn rand_like randn_like randint bernoulli multinomial normal dropout".split())


@dataclass(frozen=True)
class At:
    """A position along a dimension."""

    dim: int
    step: Step


@dataclass(frozen=True)
class Read:
    """The part of a tensor at the numbers of the iterations of the outer and the inner loop."""

    source: torch.Tensor
    outer: At | None
    inner: At | None


@dataclass(frozen=True)
class Call:
    """One of the tensors that a torch call returns."""

    function: Any
    args: Any
    kwargs: Mapping[str, Any]
    leaf: int


@dataclass(frozen=True)
class Write:
    """A cell that the body writes."""

    target: torch.Tensor
    outer: At | None
    inner: At | None
    value: torch.Tensor
    """With the shape of the cell."""

    def is_at(self, other: Write | Read) -> bool:
        """Whether the other one is at the same cell."""
        return _same(self.outer, other.outer) and _same(self.inner, other.inner)


def shape_without(shape: Any, dims: list[int]) -> list[Any]:
    """A shape without some of its dimensions."""
    return [size for d, size in enumerate(shape) if d not in dims]


class Tape(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """One run of the body."""

    def __init__(self, outer: Span, inner: Span | None, path: Path) -> None:
        super().__init__()
        self.outer, self.inner, self.path = outer, inner, path
        self.origins: dict[int, Read | Call] = {}
        self.kept: list[torch.Tensor] = []
        """Holding the tensors keeps their ids."""
        self.symbols: dict[int, str] = {}
        """Variables at the beginning of an iteration, by the id of the tensor that stands for them."""
        self.used: dict[int, torch.Tensor] = {}
        """The tensors that calls read, by id."""
        self.local: set[int] = set()
        """The memory of tensors that an iteration creates."""
        self.writes: list[Write] = []
        self._is_running = False
        """Whether a call of the user's code is recorded now."""
        self.has_cells = False
        """Whether the inner loop has run."""
        self.is_inside = False
        """Whether the inner loop runs."""
        self.row_writes: list[tuple[torch.Tensor, tuple[Any, ...]]] = []
        """Tensors that the outer loop writes before the inner one, each with the index in the tensor or in a row of it."""

    # Values ------------------------------------------------------------------------------------------------------

    def symbol(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """A tensor that stands for a variable at the beginning of an iteration."""
        value = like.new_empty(like.shape)
        self.symbols[id(value)] = name
        self.kept.append(value)
        return value

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on the iteration."""
        return id(tensor) in self.origins or id(tensor) in self.symbols

    def inputs(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensors that a call computes a tensor from."""
        origin = self.origins.get(id(tensor))
        if isinstance(origin, Call):
            yield from (item for item in tree_leaves((origin.args, origin.kwargs)) if isinstance(item, torch.Tensor))

    def numbers(self, tensor: torch.Tensor) -> Iterator[Changing]:
        """The numbers that a call computes a tensor from."""
        origin = self.origins.get(id(tensor))
        if isinstance(origin, Call):
            yield from (item for item in tree_leaves((origin.args, origin.kwargs)) if isinstance(item, Changing))

    def _add(self, value: torch.Tensor, origin: Read | Call) -> torch.Tensor:
        self.origins[id(value)] = origin
        self.kept.append(value)
        self.local.add(storage_of(value))
        return value

    # Torch calls -------------------------------------------------------------------------------------------------

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_running:
            # Modes of torch.export let subclasses of tensors call a function again under all modes.
            return function(*args, **kwargs)
        self._is_running = True
        try:
            return self._recorded(function, args, kwargs)
        finally:
            self._is_running = False

    def _recorded(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if function is torch.Tensor.__getitem__ and has_step(args[1]):
            return self._read(*args)
        if function is torch.Tensor.__setitem__ and (has_step(args[1]) or self._is_cell(args[0])):
            return self._write(*args)
        if function in (torch.select, torch.Tensor.select) and len(args) == 3 and isinstance(args[2], Step):
            return self._read(args[0], (slice(None),) * (args[1] % args[0].dim()) + (args[2],))
        name = str(getattr(function, "__name__", ""))
        if name == "__setitem__" and (id(args[0]) in self.symbols or storage_of(args[0]) in self.local):
            return self._write_row(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        if name in RANDOM:
            raise NotKept("its body draws random numbers")
        if function in FACTORIES and (number := number_argument(function, args)) is not None:
            return self._filled(function, args, kwargs, number)
        if name in IN_PLACE and isinstance(args[0], torch.Tensor) and id(args[0]) in self.origins:
            # ``best += cost`` of a value that the body has computed.
            function = getattr(torch.Tensor, f"__{name[3:]}")
        elif any(True for _ in targets(function, args, kwargs)):
            raise NotKept(f"its body changes a tensor in place by {name.strip('_')}")
        if name in LIKE:
            return self._created(function, args, kwargs)
        return self._called(function, args, kwargs)

    def _called(self, function: Any, args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = [item for item in leaves if isinstance(item, torch.Tensor)]
        numbers = [item for item in leaves if isinstance(item, Changing)]
        if numbers and not tensors:
            raise NotKept("a function of the number of the iteration has no tensor")

        def sample(item: Any) -> Any:
            if not isinstance(item, Changing):
                return item
            return item.at(lambda step: torch.zeros((), dtype=torch.int64, device=tensors[0].device))

        result = function(*tree_map(sample, args), **tree_map(sample, kwargs))
        computed = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        if computed:
            self.used |= {id(item): item for item in tensors}
        is_known = bool(numbers) or any(map(self.is_known, tensors))
        for i, item in enumerate(tree_leaves(result)):
            if isinstance(item, torch.Tensor) and not self.is_known(item):
                if is_known:
                    self._add(item, Call(function, args, kwargs, i))
                elif storage_of(item) not in {storage_of(tensor) for tensor in tensors}:
                    self.kept.append(item)
                    self.local.add(storage_of(item))
        return result

    def _created(self, function: Any, args: Any, kwargs: Any) -> torch.Tensor:
        like, *others = args
        values = [item for item in tree_leaves((others, kwargs)) if isinstance(item, (torch.Tensor, Changing))]
        if values:
            return self._called(function, args, kwargs)
        result: torch.Tensor = function(like, *others, **kwargs)
        self.kept.append(result)
        self.local.add(storage_of(result))
        return result

    def _filled(self, function: Any, args: Any, kwargs: Any, number: Changing) -> torch.Tensor:
        """``torch.tensor(i)`` or ``torch.full(shape, i)``."""
        dtype = kwargs.get("dtype") or (torch.int64 if number.is_whole else torch.get_default_dtype())
        zero = torch.zeros((), dtype=dtype, device=kwargs.get("device"))
        value: torch.Tensor = self._called(torch.Tensor.add, (zero, number), {})
        value = self._called(torch.Tensor.to, (value, dtype), {})
        if function is torch.full:
            shape = args[0] if isinstance(args[0], (tuple, list)) else (args[0],)
            value = self._called(torch.Tensor.expand, (value, shape), {})
        return value

    # Positions ---------------------------------------------------------------------------------------------------

    def _is_cell(self, target: Any) -> bool:
        return isinstance(target, torch.Tensor) and isinstance(self.origins.get(id(target)), Read)

    def _located(self, tensor: torch.Tensor, index: Any) -> tuple[Read, tuple[Any, ...]]:
        """The cell of an index, and the index in it."""
        items = list(index) if isinstance(index, tuple) else [index]
        if not any(item is Ellipsis for item in items):
            items.append(Ellipsis)
        used = sum(_width(item) for item in items)
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (tensor.dim() - used)
        origin = self.origins.get(id(tensor))
        read = origin if isinstance(origin, Read) else Read(tensor, None, None)
        taken = [at.dim for at in (read.outer, read.inner) if at is not None]
        free = [d for d in range(read.source.dim()) if d not in taken]
        rest: list[Any] = []
        outer, inner, dim = read.outer, read.inner, 0
        for item in items:
            step = item
            if isinstance(item, slice) and has_step(item):
                start, stop = item.start, item.stop
                if not (isinstance(start, Step) and isinstance(stop, Step) and item.step in (None, 1)):
                    raise NotKept("it reads a range of cells")
                if start.span != stop.span or not stop.same(start + 1):
                    raise NotKept("it reads a range of cells")
                step = start
                rest.append(None)
            if isinstance(step, Changing):
                if not isinstance(step, Step) or step.step == 0:
                    raise NotKept("it reads a tensor at a position that changes irregularly")
                place = At(free[dim], step)
                if step.span == self.outer and outer is None:
                    outer = place
                elif step.span == self.inner and inner is None:
                    inner = place
                else:
                    raise NotKept("it reads a tensor at the number of one loop in two dimensions")
            else:
                rest.append(item)
            dim += _width(item)
        return Read(read.source, outer, inner), tuple(rest)

    def _read(self, tensor: torch.Tensor, index: Any) -> torch.Tensor:
        read, rest = self._located(tensor, index)
        value = self._of(read)
        if all(isinstance(item, slice) and item == slice(None) for item in rest):
            return value
        result: torch.Tensor = self._called(torch.Tensor.__getitem__, (value, rest), {})
        return result

    def _of(self, read: Read) -> torch.Tensor:
        """The value of a cell, as this run has written it."""
        for write in self.writes:
            if write.target is read.source and write.is_at(read):
                return write.value
        dims = [at.dim for at in (read.outer, read.inner) if at is not None]
        value = read.source.new_empty(shape_without(read.source.shape, dims))
        return self._add(value, read)

    def _write_row(self, target: torch.Tensor, index: tuple[Any, ...]) -> None:
        """Note what the outer loop writes. A loop of its statements alone computes it."""
        if self.is_inside or self.has_cells:
            raise NotKept("it writes a tensor after its inner loop")
        self.row_writes.append((target, index))

    def _write(self, target: torch.Tensor, index: Any, value: Any) -> None:
        read, rest = self._located(target, index)
        dims = [at.dim for at in (read.outer, read.inner) if at is not None]
        shape = shape_without(read.source.shape, dims)
        if isinstance(value, Changing):
            value = self._filled(torch.full, (shape, value), {"device": target.device}, value)
        if not all((isinstance(item, slice) and item == slice(None)) or item is None for item in rest):
            value = self._called(with_item, (self._of(read), rest, value), {})
        elif isinstance(value, torch.Tensor):
            lengths = [1 if item is None else size for item, size in zip(rest, _sizes(rest, shape), strict=True)]
            if value.dim() > len(shape):
                value = self._called(torch.Tensor.expand, (value, lengths), {})
                value = self._called(torch.Tensor.reshape, (value, shape), {})
            value = self._called(torch.Tensor.to, (value, target.dtype), {})
            value = self._called(torch.Tensor.expand, (value, shape), {})
        else:
            value = torch.full(shape, value, dtype=target.dtype, device=target.device)
        write = Write(read.source, read.outer, read.inner, value)
        if not self.is_inside:
            assert read.outer is not None
            row = [slice(None) if d == read.outer.dim else None for d in range(read.source.dim())]
            free = iter(rest)
            self._write_row(read.source, tuple(next(free, slice(None)) if item is None else item for item in row))
            return
        if read.inner is None:
            raise NotKept("it writes a tensor at the number of the outer loop in the inner one")
        others = [item for item in self.writes if item.target is read.source]
        if not all(map(write.is_at, others)):
            raise NotKept("it writes several cells of one tensor")
        self.writes = [item for item in self.writes if item.target is not read.source] + [write]


def with_item(value: torch.Tensor, index: Any, item: Any) -> torch.Tensor:
    """A copy of a cell in which a part has changed."""
    result = value.clone()
    result[index] = item
    return result


def _width(item: Any) -> int:
    """The dimensions of a tensor that an item of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, torch.Tensor) and item.dtype == torch.bool:
        return int(item.dim())
    return 1


def _sizes(rest: tuple[Any, ...], shape: list[Any]) -> list[Any]:
    """The sizes of the dimensions of an index without numbers; of a new dimension, 1."""
    sizes = iter(shape)
    return [1 if item is None else next(sizes) for item in rest]


def _same(one: At | None, other: At | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dim == other.dim and one.step.span == other.step.span and one.step.same(other.step)
