"""Two nested long loops whose cells read neighbours that were computed before: one loop over rows, columns or diagonals.

The body runs once for each path (:mod:`mtmc_lsp.capture.worker.loops.nests.conditions`), on tensors that stand for one cell. Then
all cells of a diagonal are computed at once in each iteration of one loop, which is kept like a loop of the user's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from mtmc_lsp.capture.worker.loops.iteration import Changing, NotKept, Span, Step, Steps
from mtmc_lsp.capture.worker.loops.lists import Collected
from mtmc_lsp.capture.worker.loops.nests.conditions import Condition, Path, refuse_many
from mtmc_lsp.capture.worker.loops.nests.ends import Ends
from mtmc_lsp.capture.worker.loops.nests.tape import Tape
from mtmc_lsp.capture.worker.loops.nests.wave import Wave

MakeLoop = Callable[[Steps, tuple[str, ...], tuple[str, ...]], Any]
"""Makes a loop of the lines of the nest from its steps, carried variables and lists."""


class Nest:
    """One execution of two nested loops."""

    def __init__(self, number: int, line: int, steps: Steps, make_loop: MakeLoop) -> None:
        self.line, self.steps, self.make_loop = line, steps, make_loop
        self.spans = [Span(number, steps.count, self), Span(number + 1, None, self)]
        self.inner: Any = None
        """The inner loop that runs now."""
        self.inner_steps: Steps | None = None
        self.tape: Tape | None = None
        self.path = Path()
        self.before: dict[str, Any] = {}
        """The variables before the nest."""
        self.ends: list[Ends] = []
        """What each run of the body left."""
        self.finals: dict[str, Any] = {}
        self.collected: dict[str, Collected] = {}

    def condition(self, compare: Callable[[Any, Any], Any], number: Changing, other: Any) -> bool:
        """The answer to a comparison of numbers in this run."""
        return self.path.answer(Condition(compare, number, other))

    # The outer loop ----------------------------------------------------------------------------------------------

    def iterations(self) -> Iterator[Any]:
        """One iteration of the outer loop for each path."""
        if torch.is_grad_enabled():
            raise NotKept("its gradient is computed")
        path: Path | None = self.path
        while path is not None:
            self.path, self.tape, self.inner = path, None, None
            refuse_many(len(self.ends) + 1)
            self.tape = Tape(self.spans[0], None, path)
            self.end = Ends(self.tape)
            with self.tape:
                item = self.steps.item(Step(self.spans[0], 0, 1))
            yield item
            if self.inner is None:
                raise NotKept("not each of its iterations runs the inner loop", self.line)
            self.ends.append(self.end)
            path = path.following()
        self.tape = None

    def rows(self) -> set[str] | None:
        """The rows that the outer loop writes before the inner one, by variable; ``None`` if it writes nothing.

        Then a loop of the outer loop's statements alone computes what they write.
        """
        if not any(end.tape.row_writes for end in self.ends):
            return None
        if any(end.items for end in self.ends):
            raise NotKept("it writes a tensor before its inner loop, and appends to a list")
        targets = [write.target for end in self.ends for write in end.tape.writes]
        return {
            name
            for end in self.ends
            for name, value in end.inner_before.items()
            if any(value is item for item in targets)
        }

    def finish(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Compute the cells of all iterations.

        Args:
            rows: what rows contain before the inner loop, in all iterations.

        Raises:
            NotKept: they are not one loop.
        """
        try:
            wave = Wave(self.spans, self.ends, self.make_loop, rows)
            wave.run()
            self.finals, self.collected = wave.finals(), wave.collected()
        except NotKept as error:
            error.line = error.line or self.line
            raise
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raise NotKept("torch cannot compute its cells at once", self.line) from error

    def enter(self, loop: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """The variables at the beginning of an iteration of one of the loops."""
        assert self.tape is not None
        is_inner = loop is self.inner
        if not is_inner:
            self.before = self.before or dict(values)
            values = self.before
            self.end.outer_before = dict(values)
        else:
            self.end.inner_before = dict(values)
            self.tape.is_inside = self.tape.has_cells = True
        symbols = {
            name: self.tape.symbol(name, value)
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and name not in loop.written
        }
        (self.end.inner_symbols if is_inner else self.end.outer_symbols).update(symbols)
        self.tape.__enter__()
        return {**values, **symbols}

    def leave(self, loop: Any, values: Mapping[str, Any]) -> None:
        """Note the variables at the end of an iteration."""
        assert self.tape is not None
        self.tape.__exit__(None, None, None)
        if loop is self.inner:
            self.end.inner_after = dict(values)
            self.tape.is_inside = False
            self._check(self.end.inner_before, values)
        else:
            self.end.outer_after = dict(values)
            self._check(self.end.outer_before, values)

    def _check(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Refuse variables other than tensors that change."""
        for name, value in after.items():
            old = before.get(name)
            if isinstance(value, (torch.Tensor, Changing)) or name not in before:
                continue
            if isinstance(value, (list, tuple, dict)):
                if any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(value)[0]):
                    raise NotKept(f"it carries tensors in the list or dictionary {name}")
                continue
            if value is not old and not (type(value) is type(old) and value == old):
                raise NotKept(f"the number {name} changes")

    # The inner loop ----------------------------------------------------------------------------------------------

    def cells(self, loop: Any) -> Iterator[Any]:
        """The only iteration of the inner loop."""
        assert self.tape is not None
        if self.inner is not None:
            raise NotKept("each of its iterations runs several long loops")
        if self.inner_steps is None:
            self.inner_steps = loop.steps
            self.spans[1] = Span(self.spans[1].loop, loop.steps.count, self)
        self.inner, self.tape.inner = loop, self.spans[1]
        with self.tape:
            item = loop.steps.item(Step(self.spans[1], 0, 1))
        yield item

    def results(self, loop: Any, values: Mapping[str, Any], is_outer: bool) -> dict[str, Any]:
        """The variables after one of the loops."""
        if is_outer:
            return {**values, **self.finals, **self.collected}
        assert self.tape is not None
        lasts = {}
        for name, value in self.end.inner_after.items():
            if isinstance(value, torch.Tensor) and name not in loop.written:
                lasts[name] = self.tape.symbol(name, value)
        self.end.lasts = lasts
        return {**values, **lasts}

    def append(self, loop: Any, name: str, items: Sequence[Any], value: Any, at_front: bool) -> None:
        """Note what an iteration of the outer loop appends to a list."""
        if loop is self.inner and self.tape is not None and self.tape.is_inside:
            raise NotKept("its inner loop appends to a list")
        if name in self.end.items or not isinstance(value, torch.Tensor):
            raise NotKept("it appends several items, or none that is a tensor")
        self.end.items[name] = items, value, at_front
