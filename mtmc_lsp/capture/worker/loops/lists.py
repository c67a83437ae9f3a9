"""Lists to which a kept loop appends one tensor per iteration, or whose items it assigns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from mtmc_lsp.capture.worker.loops.gradients import stacked
from mtmc_lsp.capture.worker.loops.iteration import NotKept, Step, known
from mtmc_lsp.capture.worker.loops.markers import operators
from mtmc_lsp.capture.worker.loops.tensors import is_alike

JOINING = frozenset({torch.stack, torch.cat, torch.concat, torch.concatenate})
"""Functions that join tensors along a dimension."""
BY_RANK = {
    torch.vstack: {1: (0, True), 2: (0, False)},
    torch.hstack: {0: (0, True), 1: (0, False), 2: (1, False)},
    torch.column_stack: {0: (0, True), 1: (1, True), 2: (1, False)},
}
"""Functions that choose the dimension by the rank of the tensors (2: at least 2), and whether each becomes a slice of it."""


class _Appended:
    """The only item of a :class:`Collected` list that torch sees. It stands for the tensors of all iterations."""

    def __init__(self, owner: Collected) -> None:
        self.owner = owner

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip(("tensors", "dim"), args, strict=False)), **(kwargs or {})}
        if "axis" in given:
            given["dim"] = given.pop("axis")  # torch takes NumPy's name as well
        items, dim = given.get("tensors"), given.get("dim", 0)
        if isinstance(items, Collected) and given.keys() <= {"tensors", "dim"} and isinstance(dim, int):
            if function in BY_RANK and len(args) < 2 and "dim" not in given:
                return items.joined_by_rank(BY_RANK[function])
            if function in JOINING:
                return items.joined(dim, is_stack=function is torch.stack)
        raise NotKept(f"{getattr(function, '__name__', function)} reads a list that it appends to")


class Collected(list):  # type: ignore[type-arg]
    """A list after a loop that appended to it. It can be stacked, concatenated, reversed, and read or cut at its ends."""

    def __init__(self, before: list[Any], items: torch.Tensor, *, at_front: bool) -> None:
        super().__init__([_Appended(self)])
        self.parts: list[Any] = [items.flip(0), before] if at_front else [before, items]
        """Lists of tensors, and tensors whose first dimension is the number of the iteration."""
        self.at_front = at_front

    def append_item(self, value: Any) -> None:
        """Append what a later iteration appends."""
        self.parts = [[value], *self.parts] if self.at_front else [*self.parts, [value]]

    def joined(self, dim: int, *, is_stack: bool) -> torch.Tensor:
        """``torch.stack`` or ``torch.cat`` of the list."""
        pieces = []
        for part in self.parts:
            if isinstance(part, list):
                pieces += [torch.stack(part, dim) if is_stack else torch.cat(part, dim)] if part else []
                continue
            rank = part.dim() if is_stack else part.dim() - 1
            joined = stacked(part, dim % rank) if part.requires_grad else operators().stack(part, dim % rank)
            pieces.append(joined if is_stack else joined.flatten(dim % rank, dim % rank + 1))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def joined_by_rank(self, rules: Mapping[int, tuple[int, bool]]) -> torch.Tensor:
        """``torch.hstack`` and the like: the rule for the rank of the items says along which dimension they are joined."""
        ranks = {
            rank
            for part in self.parts
            for rank in ([item.dim() for item in part] if isinstance(part, list) else [part.dim() - 1])
        }
        rule = rules.get(min(ranks.pop(), 2)) if len(ranks) == 1 else None
        if rule is None:
            self._refused()
        dim, is_stack = rule
        return self.joined(dim, is_stack=is_stack)

    def __len__(self) -> Any:
        raise NotKept("the length of a list that it appends to is read")

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index == slice(None, None, -1):
            turned = Collected([], torch.empty(0), at_front=False)
            turned.parts = [part[::-1] if isinstance(part, list) else part.flip(0) for part in reversed(self.parts)]
            return turned
        if isinstance(index, slice) and (rest := self._without_ends(index)) is not None:
            return rest
        end = {0: self.parts[0], -1: self.parts[-1]}.get(index, []) if isinstance(index, int) else []
        if isinstance(end, torch.Tensor) or end:
            return end[index]
        return self._refused()

    def _without_ends(self, index: slice) -> Collected | None:
        """``items[1:]`` or ``items[:-1]``, where other statements than the loop appended what is left out."""
        start, stop = index.start or 0, index.stop or 0
        if index.step not in (None, 1) or not (isinstance(start, int) and isinstance(stop, int) and start >= 0 >= stop):
            return None
        parts = self.parts.copy()
        for end, count in ((0, start), (-1, -stop)):
            part = parts[end]
            if count and (not isinstance(part, list) or len(part) < count):
                return None
            if count:
                parts[end] = part[count:] if end == 0 else part[:-count]
        rest = Collected([], torch.empty(0), at_front=self.at_front)
        rest.parts = parts
        return rest

    def reverse(self) -> None:
        """Reverse the list in place."""
        self.parts = self[::-1].parts

    def __reversed__(self) -> Any:
        return self[::-1]

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        raise NotKept("a list that it appends to is used in another way than by torch.stack or torch.cat")

    __iter__ = __contains__ = __add__ = __radd__ = __iadd__ = __mul__ = __setitem__ = __delitem__ = _refused
    __eq__ = __ne__ = append = extend = insert = pop = remove = clear = sort = copy = _refused
    index = count = _refused
    __hash__ = None

    def __bool__(self) -> bool:
        return True


class Prefilled(Collected):
    """The list ``[None] * count``, whose length may be a size. A kept loop assigns its items as slices of one tensor."""

    def __init__(self, fill: Any, count: Any) -> None:
        super().__init__([], torch.empty(0), at_front=False)
        self._fill, self._count = fill, count
        self._assigned: list[tuple[Any, Any]] = []
        """Indices and what was assigned to them, before a loop assigned other items."""
        self._rows: torch.Tensor | None = None
        """All items, once a kept loop assigned some of them."""
        self._unsettle: Callable[[], None] | None = None
        """Set while the body of a kept loop is traced: lets it be traced again."""

    def begin(self, unsettle: Callable[[], None]) -> None:
        """Note that the trace of a body begins."""
        self._unsettle = unsettle
        tensors = [value for _, value in self._assigned if isinstance(value, torch.Tensor)]
        if self._rows is None and tensors:
            self._create_rows(tensors[0])

    def end(self) -> None:
        """Note that the loop ends."""
        self._unsettle = None
        if self._rows is not None:
            self.parts = [self._rows]

    def _create_rows(self, like: torch.Tensor) -> None:
        fill = self._fill if isinstance(self._fill, (int, float)) else 0
        with torch._C.DisableTorchFunction():
            self._rows = torch.full((self._count, *like.shape), fill, dtype=like.dtype, device=like.device)
            for index, value in self._assigned:
                if isinstance(value, torch.Tensor) and not is_alike(value, like):
                    self._refused()
                self._rows[index] = value

    def __setitem__(self, index: Any, value: Any) -> None:  # type: ignore[override]
        if self._unsettle is not None and isinstance(index, Step) and self._rows is None:
            if not isinstance(value, torch.Tensor):
                self._refused()
            # The next trace begins with the tensor.
            self._create_rows(value)
            self._unsettle()
        elif self._unsettle is not None or self._rows is not None:
            if isinstance(index, slice) or not isinstance(value, torch.Tensor) or not self._holds(value):
                self._refused()
            assert self._rows is not None or self._refused()
            self._rows[index] = value
        elif isinstance(index, slice):
            items = self._items()
            items[index] = value
            self._count, self._assigned = len(items), list(enumerate(items))
        else:
            self._assigned.append((index, value))

    def _holds(self, value: torch.Tensor) -> bool:
        rows = self._rows
        return rows is not None and rows.dtype == value.dtype and rows.dim() == value.dim() + 1

    def __getitem__(self, index: Any) -> Any:
        if self._rows is None:
            return self._item(index)
        if not isinstance(index, slice):
            return self._rows[index]
        if index.step is not None and index.step != 1:
            return super().__getitem__(index)
        part = Collected([], torch.empty(0), at_front=False)
        part.parts = [self._rows[index]]
        return part

    def _item(self, index: Any) -> Any:
        """The item at an index before a kept loop assigned items, without giving the length a number if possible."""
        if isinstance(index, Step):
            # The next trace has the items as a tensor, if the body assigns any.
            return self._fill if isinstance(self._fill, (int, float)) else self._refused()
        if isinstance(index, slice):
            return self._items()[index]
        place = self._place(index)
        for other, value in reversed(self._assigned):
            distance = self._place(other) - place
            if known(distance == 0):
                return value
            if not known(distance != 0):
                return self._items()[index]
        return self._fill

    def _place(self, index: Any) -> Any:
        return index + self._count if isinstance(index, int) and index < 0 else index

    def _items(self) -> list[Any]:
        """The items as a plain list, which gives the length a number."""
        if self._rows is not None:
            return list(self._rows.unbind(0))
        items = [self._fill] * int(self._count)
        for index, value in self._assigned:
            items[int(index)] = value
        return items

    @property
    def is_filled(self) -> bool:
        """Whether a kept loop assigned items."""
        return self._rows is not None

    def joined(self, dim: int, *, is_stack: bool) -> torch.Tensor:
        """``torch.stack`` or ``torch.cat`` of the list."""
        if self._rows is None:
            return torch.stack(self._items(), dim) if is_stack else torch.cat(self._items(), dim)
        return super().joined(dim, is_stack=is_stack)

    def joined_by_rank(self, rules: Mapping[int, tuple[int, bool]]) -> torch.Tensor:
        """``torch.hstack`` and the like."""
        if self._rows is None:
            self.parts = [self._items()]
        return super().joined_by_rank(rules)

    def reverse(self) -> None:
        """Reverse the list in place."""
        if self._rows is not None:
            self._rows = self._rows.flip(0)
            self.parts = [self._rows]
        else:
            self._assigned = list(enumerate(reversed(self._items())))

    def __len__(self) -> Any:
        return len(self._items()) if self._rows is None else int(self._count)

    def __iter__(self) -> Any:
        return iter(self._items())

    def __reversed__(self) -> Any:
        return reversed(self._items())
