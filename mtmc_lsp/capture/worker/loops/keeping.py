"""Decides for each loop of a target whether its body is traced once, with symbols for its state and for the iteration's number.

Such a body runs under :class:`mtmc_lsp.capture.worker.loops.kept.body.Body`, which sees every torch call. A loop that needs its
first or last iteration separately, or that cannot be kept, raises; then the target is traced again with that decision.
"""

from __future__ import annotations

import builtins
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import _get_current_function_mode_stack, _pop_mode

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
    Steps,
    TooLong,
    Zipped,
)
from mtmc_lsp.capture.worker.loops.kept.kept_loop import LEAST_ITERATIONS, LIBRARY_LINES, UNBOUND, KeptLoop, usual_count
from mtmc_lsp.capture.worker.loops.lists import Collected, Prefilled
from mtmc_lsp.capture.worker.loops.nests.nest import Nest
from mtmc_lsp.capture.worker.loops.rewriting import LOOPS, rewritten_code
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.process.worker.failures import exception_chain

T = TypeVar("T")

MOST_PEELED = 2
"""Iterations at each end that may run separately."""


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
        if not is_count or not is_filled_by_loop or usual_count(count) < LEAST_ITERATIONS:
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
