"""Lists to which a kept loop appends one tensor per iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from mtmc_lsp.capture.worker.loops.gradients import stacked
from mtmc_lsp.capture.worker.loops.iteration import NotKept
from mtmc_lsp.capture.worker.loops.markers import operators

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

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        raise NotKept("a list that it appends to is used in another way than by torch.stack or torch.cat")

    __iter__ = __contains__ = __add__ = __radd__ = __iadd__ = __mul__ = __setitem__ = __delitem__ = _refused
    __reversed__ = __eq__ = __ne__ = append = extend = insert = pop = remove = clear = sort = copy = _refused
    index = count = _refused
    __hash__ = None

    def __bool__(self) -> bool:
        return True
