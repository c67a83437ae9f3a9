"""Runs the body of a kept loop once in a trace, with symbols for its state and for the number of the iteration.

The body runs under :class:`mtmc_lsp.capture.worker.loops.body.Body`, which sees every torch call. A loop that needs its first
or last iteration separately, or that cannot be kept, raises; then the target is traced again with that decision.
"""

from __future__ import annotations

import builtins
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import _get_current_function_mode_stack, _pop_mode

from mtmc_lsp.capture.worker.loops.body import Body
from mtmc_lsp.capture.worker.loops.iteration import (
    MOST_UNROLLED,
    Changing,
    Counting,
    Enumerated,
    NeedsPeeling,
    NestedLoops,
    NotKept,
    Other,
    OutsideLoop,
    Range,
    Reversed,
    Rows,
    Slices,
    Span,
    Step,
    Steps,
    TooLong,
    Zipped,
)
from mtmc_lsp.capture.worker.loops.lists import Collected, Prefilled
from mtmc_lsp.capture.worker.loops.nests.nest import Nest
from mtmc_lsp.capture.worker.loops.rewriting import LOOPS, rewritten_code
from mtmc_lsp.capture.worker.loops.states.attributes import AttributeStates
from mtmc_lsp.capture.worker.tracing.local_modes import refuse_above_autograd
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.process.worker.failures import exception_chain

T = TypeVar("T")

LEAST_ITERATIONS = 16
"""Shorter loops are unrolled: their iterations fuse with what surrounds them."""
MOST_PASSES = 5
"""Traces of a body until the shapes and dtypes of its state are the same at both ends."""
MOST_PEELED = 2
"""Iterations at each end that may run separately."""
LIBRARY_LINES = 10_000_000
"""A loop of a library is known by its line and a multiple of this number, which is the number of its file."""


@dataclass
class Keeper:
    """The decisions for the loops of a target, by the line of their ``for``."""

    unrolled: dict[int, str] = field(default_factory=dict)
    """Why loops are unrolled."""
    peeled: dict[int, dict[str, int]] = field(default_factory=dict)
    """Iterations at the ends that run separately."""
    below_autograd: set[int] = field(default_factory=set)
    """Loops that are traced below autograd's dispatch, where parts of their bodies can leave them."""
    kept: set[int] = field(default_factory=set)
    """Loops that were long enough; they are kept for all sizes."""
    number: int = 0
    iterations: dict[int, int] = field(default_factory=dict)
    """Iterations of each unrolled loop in this run of the target."""
    traced: dict[int, int] = field(default_factory=dict)
    """The number of traced operations when it began."""
    active: KeptLoop | None = None
    """The loop whose body runs now."""
    nests: dict[int, int] = field(default_factory=dict)
    """Loops whose iterations run another long loop, with its line."""
    nest: Nest | None = None
    """The nest whose body runs now."""
    rows: set[str] | None = None
    """Set while a nest runs without its inner loop: the rows that are kept for it, by variable."""
    makes_lists: bool = False
    """Whether ``[None] * T`` was a list that a kept loop may fill."""
    has_plain_lists: bool = False
    """Whether such lists are plain ones, since the target uses them in another way."""
    codes: dict[FunctionType, tuple[CodeType, CodeType]] = field(default_factory=dict)
    """The user's code of each function with loops, and the rewritten one."""
    files: list[str] = field(default_factory=list)
    """The files of libraries whose loops may be kept."""

    def code_of(self, function: FunctionType, path: str) -> CodeType | None:
        """The code of a function with rewritten loops, if it has any; ``path`` is the user's file."""
        file = function.__code__.co_filename
        if file == path:
            return rewritten_code(function)
        if file not in self.files:
            self.files.append(file)
        return rewritten_code(function, LIBRARY_LINES * (1 + self.files.index(file)))

    def restart(self) -> None:
        """Begin a run of the target: each run numbers its loops from 0."""
        self.number, self.active, self.nest, self.rows = 0, None, None, None
        self.iterations.clear()

    def repeated(self, trace: Callable[[], T], path: str) -> T:
        """The result of ``trace``, which is repeated with other decisions while it fails because of a loop.

        Args:
            path: the user's file.

        Raises:
            TargetUnsupported: a loop can be neither kept nor unrolled.
        """
        while True:
            try:
                return trace()
            except Exception as error:
                for cause in exception_chain(error):
                    if isinstance(cause, TooLong):
                        why = self.unrolled.get(cause.line, "its statements are not of this form")
                        raise TargetUnsupported(
                            f"{cause}, and it is not one kernel, because {why}",
                            where=Location(path, cause.line),
                            remedy="docs/loops.md lists the forms that are one kernel.",
                        ) from error
                if not self.revise(error):
                    raise

    def revise(self, error: BaseException) -> bool:
        """Decide otherwise after a failed trace. Returns whether there is something else to try."""
        causes = list(exception_chain(error))
        refusal = next((item for item in causes if isinstance(item, NotKept)), None)
        end = next((item.args[0] for item in causes if isinstance(item, NeedsPeeling)), None)
        line = refusal.line if refusal is not None and refusal.line else self.active.line if self.active else 0
        # The nodes of a backward pass may have another line.
        line = line if line in self.kept else 0
        self.restart()
        if isinstance(refusal, NestedLoops) and line and line not in self.nests:
            self.nests[line] = refusal.inner_line
            # There, torch.vmap can repeat the calls of the body.
            self.below_autograd.add(line)
            return True
        if isinstance(refusal, OutsideLoop) and line not in self.below_autograd:
            self.below_autograd.add(line)
            return True
        if end is not None and line and line not in self.nests:
            counts = self.peeled.setdefault(line, {})
            counts[end] = counts.get(end, 0) + 1
            if counts[end] <= MOST_PEELED:
                return True
        why = str(refusal) if refusal is not None else "its body cannot be traced for all iterations at once"
        refused = {line} if line else self.kept - self.unrolled.keys()
        self.unrolled |= dict.fromkeys(refused, why)
        if not refused and self.makes_lists and not self.has_plain_lists:
            self.has_plain_lists = True
            return True
        return bool(refused)

    def notes(self, text: Sequence[str]) -> tuple[str, ...]:
        """What the user should know about loops that are unrolled."""
        return tuple(
            f"the loop of line {line} is unrolled, because {why}: `{text[line - 1].strip()}`"
            for line, why in sorted(self.unrolled.items())
            if line < LIBRARY_LINES
        )

    # Called by rewritten code ------------------------------------------------------------------------------------

    def loop(
        self,
        line: int,
        steps: Steps,
        carried: Sequence[str],
        targets: Sequence[str],
        lists: Sequence[str],
        written: Sequence[str],
    ) -> KeptLoop:
        """The loop in a line, about to begin."""
        return KeptLoop(self, line, steps, tuple(carried), tuple(targets), tuple(lists), tuple(written))

    def unrolling(self, line: int, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop that is unrolled.

        Raises:
            TooLong: it has too many iterations with operations.
        """
        expected = self.iterations.get(line, 0) + length_hint(items)
        for item in items:
            self.passing(line, expected)
            yield item

    def passing(self, line: int, expected: int = 0) -> None:
        """Note that an iteration of an unrolled loop begins.

        Args:
            expected: the number of iterations, if it is known.

        Raises:
            TooLong: the loop has too many iterations with operations.
        """
        count = self.iterations[line] = self.iterations.get(line, 0) + 1
        mode = get_proxy_mode()
        operations = len(mode.tracer.graph.nodes) if mode is not None else 0
        if count == 1:
            self.traced[line] = operations
        # A few iterations show whether they have operations; the others need not be traced if the length is known.
        # A library's loop cannot be written in another way.
        is_long = max(count, expected) > MOST_UNROLLED and count > LEAST_ITERATIONS and line < LIBRARY_LINES
        if is_long and operations - self.traced[line] >= count - 1:
            raise TooLong(line)
        if line in self.nests and max(count, expected) >= LEAST_ITERATIONS:
            raise TooLong(line, self.nests[line])

    def last(self, items: Any, index: int) -> Any:
        """The item at an end of a list to which a loop appends, if it has one."""
        return items[index] if isinstance(items, list) and (isinstance(items, Collected) or items) else UNBOUND

    def filled_list(self, value: Any, count: Any) -> Any:
        """``[value] * count``."""
        is_filled_by_loop = not self.has_plain_lists and (not self.kept or self.kept - self.unrolled.keys())
        is_count = isinstance(count, (int, torch.SymInt)) and not isinstance(count, bool)
        if not is_count or not is_filled_by_loop or _usual(count) < LEAST_ITERATIONS:
            return [value] * count
        self.makes_lists = True
        return Prefilled(value, count)

    def store(self, container: Any, key: Any, items: Any) -> None:
        """Store a list of a container to which a loop appended."""
        if isinstance(items, Collected):
            if not isinstance(container, (dict, list)):
                raise NotKept("it appends to a list of an object")
            container[key] = items

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """A function of numbers, in a body perhaps of the number of the iteration."""
        first = next((item for item in arguments if isinstance(item, Changing)), None)
        if first is None:
            return function(*arguments, **keywords)
        return first.passed_through(function, arguments)

    def listed(self, items: Any) -> Any:
        """``list(items)``."""
        return items if isinstance(items, Collected) and not isinstance(items, Prefilled) else list(items)

    def object(self, value: Any) -> Any:
        """An object whose method a body calls, which must not be a Python container: iterations would change it."""
        if self.active is not None and isinstance(value, (list, dict, set, deque)):
            raise NotKept("it changes a list, a dictionary or a set in another way than by appending one item")
        return value

    def range(self, *arguments: Any) -> Steps:
        """``range(...)``."""
        return Range(*arguments) if arguments else Other(builtins.range(*arguments))

    def counting(self, start: Any, symbol: str, bound: Any, step: int) -> Steps:
        """The values of a counter while it compares with a bound."""
        return Counting(start, symbol, bound, step)

    def reversed(self, steps: Steps) -> Steps:
        """``reversed(...)``."""
        return Reversed(steps) if steps.count is not None else Other(builtins.reversed(steps.plain()))

    def zip(self, *parts: Steps, **keywords: Any) -> Steps:
        """``zip(...)``."""
        return Zipped(parts, keywords)

    def enumerate(self, steps: Steps, start: Any = 0) -> Steps:
        """``enumerate(...)``."""
        return Enumerated(steps, start)

    def unbind(self, value: Any, *arguments: Any, **keywords: Any) -> Steps:
        """``value.unbind(...)``, where ``value`` may be the module torch."""
        dims = [*arguments, *keywords.values()]
        if value is torch:
            value, *dims = [*dims, 0][:2]
        if isinstance(value, torch.Tensor) and value.dim() and len(dims) < 2:
            return Rows(value, *dims)
        return Other(value.unbind(*arguments, **keywords))

    def split(self, value: Any, *arguments: Any, **keywords: Any) -> Steps:
        """``value.split(1, dim)``, where ``value`` may be the module torch."""
        given = list(arguments)
        tensor = given.pop(0) if value is torch and given else value
        length = given.pop(0) if given else keywords.get("split_size", keywords.get("split_size_or_sections"))
        dim = given.pop(0) if given else keywords.get("dim", 0)
        if isinstance(tensor, torch.Tensor) and tensor.dim() and type(length) is int and length == 1:
            return Slices(tensor, dim)
        return Other(value.split(*arguments, **keywords))

    def of(self, value: Any) -> Steps:
        """Any iterable."""
        if isinstance(value, Steps):
            return value
        if isinstance(value, Collected) and (not isinstance(value, Prefilled) or value.is_filled):
            return Rows(value.joined(0, is_stack=True))
        return Rows(value) if isinstance(value, torch.Tensor) and value.dim() else Other(value)


_current: list[Keeper] = []


def restart_loops() -> None:
    """Note that a run of the target begins."""
    if _current:
        _current[-1].restart()


@contextlib.contextmanager
def keeping_loops(keeper: Keeper, functions: Sequence[FunctionType], path: str) -> Iterator[None]:
    """While entered, ``functions`` run with rewritten loops; ``path`` is the user's file."""
    for function in functions:
        if function not in keeper.codes and (code := keeper.code_of(function, path)) is not None:
            keeper.codes[function] = function.__code__, code
    depth = len(_get_current_function_mode_stack())
    setattr(builtins, LOOPS, keeper)
    _current.append(keeper)
    try:
        for function, (_, rewritten) in keeper.codes.items():
            function.__code__ = rewritten
        yield
    finally:
        for function, (original, _) in keeper.codes.items():
            function.__code__ = original
        _current.pop()
        delattr(builtins, LOOPS)
        while len(_get_current_function_mode_stack()) > depth:
            _pop_mode()


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
        return self.steps.count is not None and _usual(self.steps.count) >= LEAST_ITERATIONS

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
        if self.line not in keeper.kept and _usual(count) < LEAST_ITERATIONS + peeled:
            return False
        keeper.kept.add(self.line)
        return _usual(count) > peeled

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


def _usual(count: Any) -> int:
    """The number of iterations at the sizes of the trace."""
    return int(count.node.hint) if isinstance(count, torch.SymInt) else int(count)
