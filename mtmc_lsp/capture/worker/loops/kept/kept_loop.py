"""One execution of a ``for`` statement: unrolled, or with its body traced once for all iterations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mtmc_lsp.capture.worker.loops.iteration import (
    NestedLoops,
    NotKept,
    Range,
    Reversed,
    Span,
    Step,
    Steps,
)
from mtmc_lsp.capture.worker.loops.kept.body import Body
from mtmc_lsp.capture.worker.loops.lists import Collected, Prefilled
from mtmc_lsp.capture.worker.loops.nests.nest import Nest
from mtmc_lsp.capture.worker.loops.states.attributes import AttributeStates
from mtmc_lsp.capture.worker.tracing.local_modes import refuse_above_autograd

if TYPE_CHECKING:
    from mtmc_lsp.capture.worker.loops.keeping import Keeper

LEAST_ITERATIONS = 16
"""Shorter loops are unrolled: their iterations fuse with what surrounds them."""
MOST_PASSES = 5
"""Traces of a body until the shapes and dtypes of its state are the same at both ends."""
LIBRARY_LINES = 10_000_000
"""A loop of a library is known by its line and a multiple of this number, which is the number of its file."""


class _Unbound:
    """Stands for a variable that has no value yet."""


UNBOUND = _Unbound()


class KeptLoop:
    """One execution of a ``for`` statement."""

    def __init__(
        self,
        keeper: Keeper,
        line: int,
        steps: Steps,
        carried: tuple[str, ...],
        targets: tuple[str, ...],
        lists: tuple[str, ...],
        written: tuple[str, ...],
    ) -> None:
        self.keeper, self.line, self.steps = keeper, line, steps
        self.carried, self.targets, self.lists, self.written = carried, targets, lists, written
        self._body: Body | None = None
        """The trace of the body, while it runs."""
        self._before: dict[str, Any] | None = None
        """The variables before the kept iterations. Each trace of the body begins with them."""
        self._finals: dict[str, Any] | None = None
        """The variables after the kept iterations."""
        self._collected: dict[str, Collected] = {}
        self._attributes = AttributeStates()
        self._nest: Nest | None = None
        """The nest that it is the outer or the inner loop of."""
        self._is_diagonal = False

    def __iter__(self) -> Iterator[Any]:
        """The items of the iterations, of a kept loop only those whose body is traced."""
        if self.keeper.rows is not None and self._is_long():
            return
        if self.keeper.nest is not None and self._is_long():
            self._nest = self.keeper.nest
            yield from self._nest.cells(self)
            return
        if not self._is_kept():
            yield from self.keeper.unrolling(self.line, self.steps)
            return
        if self.line in self.keeper.below_autograd:
            refuse_above_autograd()
        if self.line in self.keeper.nests and not self._is_diagonal:
            yield from self._nested()
            return
        yield from self._once()

    def _once(self) -> Iterator[Any]:
        """The items for which the body runs, where it is traced once."""
        peeled = self.keeper.peeled.get(self.line, {})
        first, last = peeled.get("first", 0), peeled.get("last", 0)
        for i in range(first):
            yield self.steps.item(i)
        self.keeper.active = self
        body: Body | None = None
        iterations = self.keeper.iterations.copy()
        for _ in range(MOST_PASSES):
            self.keeper.number += 1
            self.keeper.iterations = iterations.copy()
            body = self._body = Body(Span(self.keeper.number, self.steps.count - first - last), body)
            with body:
                item = self.steps.item(Step(body.span, first, 1))
            yield item
            if body.is_settled():
                break
        else:
            raise NotKept("its state has another shape or dtype in each iteration")
        self._finals, self._collected, self._body = body.finish(), body.collected, None
        for items in self._prefilled():
            items.end()
        self.keeper.active = None
        for i in range(last, 0, -1):
            yield self.steps.item(self.steps.count - i)

    def _nested(self) -> Iterator[Any]:
        """The items for which the body of a nest runs."""
        keeper = self.keeper
        keeper.number += 2
        nest = self._nest = keeper.nest = Nest(keeper.number - 1, self.line, self.steps, self._diagonals)
        keeper.active = self
        yield from nest.iterations()
        keeper.active = keeper.nest = None
        names = nest.rows()
        if names is not None:
            keeper.rows, self._nest = names, None
            yield from self._once()
            keeper.rows, self._nest = None, nest
        nest.finish({name: self._collected.pop(name).joined(0, is_stack=True) for name in names or ()})

    def _diagonals(self, steps: Steps, carried: tuple[str, ...], lists: tuple[str, ...]) -> KeptLoop:
        """The loop that computes the cells of a nest."""
        loop = KeptLoop(self.keeper, self.line, steps, carried, (), lists, ())
        loop._is_diagonal = True
        return loop

    def _is_long(self) -> bool:
        return self.steps.count is not None and usual_count(self.steps.count) >= LEAST_ITERATIONS

    def _is_kept(self) -> bool:
        """Whether the body is traced once. That is decided at the first run and stays for other sizes."""
        keeper, count = self.keeper, self.steps.count
        if keeper.active is not None:
            if self._is_long():
                raise NestedLoops(self.line)
            return False
        if self.line in keeper.unrolled or count is None:
            return False
        if self.line >= LIBRARY_LINES and not isinstance(self.steps, (Range, Reversed)):
            # Loops over layers are many, and each attempt traces the target again.
            return False
        peeled = sum(keeper.peeled.get(self.line, {}).values())
        if self.line not in keeper.kept and usual_count(count) < LEAST_ITERATIONS + peeled:
            return False
        keeper.kept.add(self.line)
        return usual_count(count) > peeled

    def enter(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The carried variables at the beginning of an iteration."""
        variables = values
        values = {name: values[name] for name in self.carried if name in values} | self._after()
        if self._nest is not None:
            values = {name: value for name, value in values.items() if value is not UNBOUND}
            values = self._nest.enter(self, values)
        if self._body is not None:
            if self._before is None:
                self._before = {name: value for name, value in values.items() if value is not UNBOUND}
            for items in self._prefilled():
                items.begin(self._body.unsettle)
            before = {name: self._before[name] for name in self._before if self._is_state(name)}
            entered = self._body.enter({**before, **self._attributes.begin(variables)})
            values |= {name: entered[name] for name in before}
            self._attributes.set({name: entered[name] for name in entered if name not in before})
            self._body.__enter__()
        return tuple(values.get(name, UNBOUND) for name in self.carried)

    def _after(self) -> dict[str, Any]:
        """The variables after the kept iterations, for the first iteration or statement that follows them."""
        finals, self._finals = self._finals, None
        self._attributes.set(finals or {})
        result = {name: value for name, value in (finals or {}).items() if value is not UNBOUND}
        for name in result.keys() & set(self.written):
            # Other variables may hold the container, too.
            container = (self._before or {})[name]
            if isinstance(container, list):
                container[:] = result[name]
            else:
                container.update(result[name])
            result[name] = container
        return result

    def leave(self, values: Mapping[str, Any]) -> None:
        """Note the end of an iteration."""
        if self._nest is not None:
            self._nest.leave(self, {name: values[name] for name in self.carried if values[name] is not UNBOUND})
        if self._body is not None:
            self._body.__exit__(None, None, None)
            left = (name for name in self.carried if self._is_state(name) and values[name] is not UNBOUND)
            attributes, has_more = self._attributes.end(values)
            if has_more:
                self._body.unsettle()
            self._body.leave({**{name: values[name] for name in left}, **attributes})

    def _is_state(self, name: str) -> bool:
        """Whether iterations carry a variable to the next one: all that they assign, and containers with tensors.

        Raises:
            NotKept: the body writes items of another object.
        """
        before = (self._before or {}).get(name)
        if name in self.written and not isinstance(before, (list, dict, torch.Tensor)):
            raise NotKept("it changes items of an object")
        return name not in self.written or not isinstance(before, (torch.Tensor, Prefilled))

    def _prefilled(self) -> list[Prefilled]:
        """The lists whose items the body assigns."""
        values = (self._before or {}).items()
        return [value for name, value in values if name in self.written and isinstance(value, Prefilled)]

    def append(self, name: str, items: list[Any], value: Any, at_front: bool) -> None:
        """``items.append(value)`` or ``items.insert(0, value)`` in the body."""
        if self._nest is not None:
            self._nest.append(self, name, items, value, at_front)
        elif self._body is not None:
            self._body.append(name, items, value, at_front=at_front)
        elif name in self._collected:
            self._collected[name].append_item(value)
        elif at_front:
            items.insert(0, value)
        elif hasattr(items, "append"):
            items.append(value)
        else:
            # The user's code is ``items += [value]``.
            items += [value]

    def results(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The variables after the loop: those that it carries, those of the iteration, and lists."""
        values = {**values, **self._after(), **self._collected}
        if self.keeper.rows is not None and self.keeper.active is not None:
            for name in self.keeper.rows & values.keys():
                self.keeper.active.append(name, [], values[name], at_front=False)
        if self._nest is not None:
            values = self._nest.results(self, values, is_outer=self.keeper.nest is None)
        for name in self.targets:
            if isinstance(values.get(name), Step):
                values[name] = values[name].last
        return tuple(values.get(name, UNBOUND) for name in (*self.carried, *self.targets, *self.lists))


def usual_count(count: Any) -> int:
    """The number of iterations at the sizes of the trace."""
    return int(count.node.hint) if isinstance(count, torch.SymInt) else int(count)
