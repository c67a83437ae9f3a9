"""Observes each memory access of kernels under Triton's interpreter. Runs in workers."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from mtmc_lsp.kernels.messages import MOST_STEPS, Access, Fault, FaultKind, LaunchWork
from mtmc_lsp.kernels.worker.launch_record import launch_of
from mtmc_lsp.kernels.worker.memory import Memory, Region, is_unwritten, pattern_of, poison
from mtmc_lsp.kernels.worker.sampling import SampleEnded, is_left_out

ORDER = ("gathered", "strided", "gathered rows", "contiguous", "broadcast", "scalar")
"""Access patterns, the most expensive first."""
MANY = -1
FIRST_PROGRAMS, FIRST_STEPS, TOO_MANY = 8, 400, 4.0
"""Programs of a launch, or memory operations, after which those of the whole grid are estimated, and how many times the limit the
estimate must be: later programs may do less."""


class TooManySteps(Exception):
    """The call has too many memory operations."""


@dataclass
class _Seen:
    """What was seen of one load, store or atomic operation."""

    tensor: str
    is_masked: bool = False
    elements: float = 0.0
    bytes: float = 0.0
    tensor_bytes: int = 0
    patterns: Counter[str] = field(default_factory=Counter)


class Observer:
    """Observes the launches of one call."""

    def __init__(
        self, memory: Memory, *, fills_lanes: bool = True, most_programs: int = 0, most_steps: int = MOST_STEPS
    ) -> None:
        """Prepare.

        Args:
            fills_lanes: whether lanes without a defined value are NaN; otherwise they are 0, as they often are by chance.
            most_programs: see :class:`~mtmc_lsp.kernels.messages.TraceRequest`.
            most_steps: the same.
        """
        self.memory, self._fills_lanes, self._most_programs = memory, fills_lanes, most_programs
        self._most_steps = most_steps
        self.faults: dict[tuple[FaultKind, str, int], Fault] = {}
        self.undefined: set[tuple[str, int]] = set()
        """Kernel and line of the loads that leave lanes undefined."""
        self.launches: list[LaunchWork] = []
        self.steps = 0
        self._is_hopeless = False
        self._seen: dict[tuple[str, int, str], _Seen] = {}
        self._in_launch: dict[tuple[str, int, str], _Seen] = {}
        """The same for the programs of the current launch that ran."""
        self._operations = 0.0
        self._kernel, self._file, self._program, self._first_step = "", "", 0, 0
        self._grid: tuple[int, ...] = (0, 1, 1)
        self._tracks_programs = True
        self.has_mask = True
        """Whether the access that runs states a mask."""

    @property
    def kernel(self) -> str:
        """The kernel of the last launch."""
        return self._kernel

    @property
    def is_too_long(self) -> bool:
        """Whether the call has more memory operations than are observed, or certainly will have."""
        return (self.steps > self._most_steps or self._is_hopeless) and not self._most_programs

    def _check_pace(self, ran: int, total: int) -> None:
        """Give up after a few programs of a launch that needs far more memory operations than are observed."""
        steps = self.steps - self._first_step
        if ran >= FIRST_PROGRAMS or (ran and steps >= FIRST_STEPS):
            self._is_hopeless |= self._first_step + steps / ran * total > TOO_MANY * self._most_steps
        if self.is_too_long:
            raise TooManySteps

    @property
    def accesses(self) -> tuple[Access, ...]:
        """All accesses, by kernel and line."""
        return tuple(
            Access(
                kernel,
                line,
                operation,
                seen.tensor,
                next((name for name in ORDER if seen.patterns[name]), "scalar"),
                seen.is_masked,
                round(seen.elements),
                round(seen.bytes),
                seen.tensor_bytes,
            )
            for (kernel, line, operation), seen in sorted(self._seen.items())
        )

    # Launches --------------------------------------------------------------------------------------------------------

    def launched(self, original: Any, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a launch."""
        function = executor.fn
        self._kernel, self._file = function.__name__, function.__code__.co_filename
        self.memory.begin_launch()
        self._tracks_programs = not self._most_programs
        values = {**dict(zip(executor.arg_names, args, strict=False)), **kwargs}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self.memory.address(value, name)
        self._operations, self._grid, self._in_launch = 0.0, (0, 1, 1), {}
        counted, self._first_step = [0], self.steps
        executor.fn = self._counted(function, counted)
        try:
            with contextlib.suppress(SampleEnded):
                original(executor, *args, **kwargs)
        finally:
            executor.fn = function
            total, ran = int(numpy.prod(self._grid)), counted[0]
            self._add_launch(total / max(1, ran))
            launch = launch_of(function.__name__, executor, values, kwargs)
            operations = self._operations * total / max(1, ran)
            numbers = {name: value for name, value in values.items() if type(value) is int}
            self.launches.append(LaunchWork(launch, self._grid, total, ran, operations, numbers))

    def _add_launch(self, weight: float) -> None:
        """Add the accesses of a launch; each program that ran stands for ``weight`` programs."""
        for key, seen in self._in_launch.items():
            total = self._seen.setdefault(key, _Seen(seen.tensor))
            total.tensor = total.tensor or seen.tensor
            total.is_masked |= seen.is_masked
            total.elements += seen.elements * weight
            total.bytes += seen.bytes * weight
            total.tensor_bytes = max(total.tensor_bytes, seen.tensor_bytes)
            total.patterns += seen.patterns
        self._in_launch = {}

    def _counted(self, function: Any, counted: list[int]) -> Any:
        """The kernel, which counts its programs and leaves some out."""
        from triton.runtime import interpreter

        # The function below has the globals of the user's kernel.
        builder, most, left_out = interpreter.interpreter_builder, self._most_programs, is_left_out

        def program(**arguments: Any) -> None:
            grid = self._grid = tuple(map(int, builder.grid_dim))
            total, (x, y, z) = grid[0] * grid[1] * grid[2], builder.grid_idx
            number = (int(x) * grid[1] + int(y)) * grid[2] + int(z)
            if most and left_out(number, total, most, self.steps - self._first_step):
                return
            self._check_pace(counted[0], total)
            counted[0] += 1
            self._program = number + 1
            function(**arguments)

        like = type(function)(program.__code__, function.__globals__, function.__name__, None, program.__closure__)
        like.__annotations__ = function.__annotations__
        like.__signature__ = inspect.signature(function)
        return like

    # Accesses --------------------------------------------------------------------------------------------------------

    def load(self, original: Any, builder: Any, pointer: Any, mask: Any, other: Any, rest: tuple[Any, ...]) -> Any:
        """A masked load."""
        from triton.runtime.interpreter import TensorHandle, _get_np_dtype

        kind = numpy.dtype(_get_np_dtype(pointer.get_element_ty()))
        active = numpy.broadcast_to(mask.data, pointer.data.shape).astype(bool)
        line = self._line()
        undefined = poison(kind) if self._fills_lanes else numpy.zeros((), dtype=kind)
        if other is None:
            other = TensorHandle(numpy.full(pointer.data.shape, undefined, dtype=kind), pointer.get_element_ty())
            if not active.all():
                self.undefined.add((self._kernel, line))
        real, inside = self._resolved("load", line, pointer.data, active, kind.itemsize)
        result = original(builder, TensorHandle(real, pointer.dtype), TensorHandle(inside, mask.dtype), other, *rest)
        if not inside.all():
            result.data = numpy.where(active & ~inside, undefined, result.data).astype(result.data.dtype)
        self._check_initialised(line, pointer.data, inside, result.data)
        return result

    def store(self, original: Any, builder: Any, pointer: Any, value: Any, mask: Any, rest: tuple[Any, ...]) -> Any:
        """A masked store."""
        from triton.runtime.interpreter import TensorHandle

        kind = value.data.dtype
        active = numpy.broadcast_to(mask.data, pointer.data.shape).astype(bool)
        line = self._line()
        real, inside = self._resolved("store", line, pointer.data, active, kind.itemsize)
        values = numpy.broadcast_to(value.data, pointer.data.shape)
        self._check_order(line, pointer.data, inside, values, real)
        return original(builder, TensorHandle(real, pointer.dtype), value, TensorHandle(inside, mask.dtype), *rest)

    def atomic(
        self, original: Any, builder: Any, operation: Any, pointer: Any, value: Any, mask: Any, rest: Any
    ) -> Any:
        """An atomic operation."""
        from triton.runtime.interpreter import TensorHandle

        kind = value.data.dtype
        active = numpy.broadcast_to(mask.data, pointer.data.shape).astype(bool)
        line = self._line()
        real, inside = self._resolved("atomic", line, pointer.data, active, kind.itemsize)
        for region, lanes, offsets in self.memory.located(pointer.data, inside) if inside.any() else ():
            if region is not None and region.written is not None and not region.is_input:
                bytes_ = torch.tensor([], dtype=torch.uint8).set_(region.storage).numpy()
                chosen = offsets[lanes]
                held = bytes_[chosen[:, None] + numpy.arange(kind.itemsize)].copy().view(kind)[:, 0]
                if (is_unwritten(held) & ~region.written[chosen]).any():
                    self._add(FaultKind.UNINITIALISED, line, f"{region.name} is added to before anything wrote it")
            if region is not None and region.written is not None:
                region.written[offsets[lanes]] = region.atomic[offsets[lanes]] = True
        # The interpreter's atomic operations read masked lanes, too.
        safe = real[inside][0] if inside.any() else numpy.uint64(0)
        if not inside.any():
            return TensorHandle(numpy.zeros(pointer.data.shape, dtype=kind), value.dtype)
        pointers = TensorHandle(numpy.where(inside, real, safe), pointer.dtype)
        return original(builder, operation, pointers, value, TensorHandle(inside, mask.dtype), *rest)

    def swap(self, original: Any, builder: Any, pointer: Any, compared: Any, value: Any, rest: tuple[Any, ...]) -> Any:
        """An atomic compare-and-swap, as in a lock."""
        from triton.runtime.interpreter import TensorHandle

        active, line = numpy.ones(pointer.data.shape, dtype=bool), self._line()
        real, inside = self._resolved("atomic", line, pointer.data, active, value.data.dtype.itemsize)
        if not inside.all():
            return TensorHandle(numpy.zeros(pointer.data.shape, dtype=value.data.dtype), value.dtype)
        for region, lanes, offsets in self.memory.located(pointer.data, inside):
            if region is not None and region.written is not None:
                region.written[offsets[lanes]] = region.atomic[offsets[lanes]] = True
        return original(builder, TensorHandle(real, pointer.dtype), compared, value, *rest)

    def worked(self, operations: float) -> None:
        """Floating-point operations of the current program."""
        self._operations += operations

    def finish(self, results: list[torch.Tensor]) -> None:
        """Check the results of the call."""
        for result in results:
            region = self.memory.region_of(result)
            if region is None and result.numel() and bool(is_unwritten(_numbers(result)).all()):
                self._add(FaultKind.NOT_WRITTEN, 0, "no program writes the result")
            if region is None or region.written is None or region.is_input:
                continue
            start = result.data_ptr() - region.address
            first: Any = numpy.zeros(region.size, dtype=bool)
            first[start :: result.element_size()] = True
            missing = first & ~region.written
            if not result.is_contiguous() or not missing.any():
                continue
            held = _numbers(result)
            positions = (numpy.nonzero(missing)[0] - start) // result.element_size()
            positions = positions[(positions >= 0) & (positions < held.size)]
            unwritten = positions[is_unwritten(held[positions])]
            if unwritten.size:
                detail = f"{unwritten.size} of {held.size} elements of {region.name} are never written"
                self._add(FaultKind.NOT_WRITTEN, 0, detail)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _resolved(self, operation: str, line: int, addresses: Any, active: Any, size: int) -> tuple[Any, Any]:
        """Real addresses, and which lanes access memory inside a tensor."""
        real, inside = numpy.zeros_like(addresses), numpy.zeros(active.shape, dtype=bool)
        tensor, tensor_bytes = "", 0
        for region, lanes, offsets in self.memory.located(addresses, active) if active.any() else ():
            if region is not None:
                tensor, tensor_bytes = region.name, region.size
                valid = lanes & (offsets >= 0) & (offsets + size <= region.size)
                real[valid] = numpy.uint64(region.address) + offsets[valid].astype(numpy.uint64)
                inside |= valid
            outside = lanes & ~inside
            if outside.any():
                self._note_outside(operation, line, region, offsets[outside], size)
        seen = self._note(operation, line, tensor, addresses, active, size)
        seen.tensor_bytes = max(seen.tensor_bytes, tensor_bytes)
        return real, inside

    def _note_outside(self, operation: str, line: int, region: Region | None, offsets: Any, size: int) -> None:
        kind = FaultKind.READ_OUTSIDE if operation == "load" else FaultKind.WRITE_OUTSIDE
        verb = "reads" if operation == "load" else "writes"
        if region is None:
            self._add(kind, line, f"it {verb} memory of no argument")
            return
        far = int(offsets.min()) if offsets.min() < 0 else int(offsets.max())
        detail = f"it {verb} element {far // size} of {region.name}, which has {region.size // size}"
        self._add(kind, line, detail)

    def _note(self, operation: str, line: int, tensor: str, addresses: Any, active: Any, size: int) -> _Seen:
        self.steps += 1
        if self.is_too_long:
            raise TooManySteps
        seen = self._in_launch.setdefault((self._kernel, line, operation), _Seen(tensor))
        seen.tensor = seen.tensor or tensor
        count = int(active.sum())
        seen.elements += count
        seen.bytes += count * size
        # The interpreter gives each atomic operation a mask.
        seen.is_masked |= not active.all() if operation == "atomic" else self.has_mask
        if count > 1 or addresses.size == 1:
            seen.patterns[pattern_of(addresses, active, size)] += 1
        return seen

    def _check_initialised(self, line: int, addresses: Any, inside: Any, values: Any) -> None:
        for region, lanes, offsets in self.memory.located(addresses, inside) if inside.any() else ():
            if region is None or region.written is None:
                continue
            chosen = offsets[lanes]
            if not region.is_input and (is_unwritten(values[lanes]) & ~region.written[chosen]).any():
                self._add(FaultKind.UNINITIALISED, line, f"{region.name} is read before anything wrote it")
            if self._tracks_programs:
                writer, plain = region.writer[chosen], ~region.atomic[chosen]
                if ((writer > 0) & (writer != self._program) & plain).any():
                    self._add(FaultKind.RACE, line, f"it reads elements of {region.name} that other programs store")
                reader = region.reader[chosen]
                region.reader[chosen] = numpy.where((reader == 0) | (reader == self._program), self._program, MANY)

    def _check_order(self, line: int, addresses: Any, inside: Any, values: Any, real: Any) -> None:
        for region, lanes, offsets in self.memory.located(addresses, inside) if inside.any() else ():
            if region is None or region.written is None:
                continue
            chosen, new = offsets[lanes], values[lanes]
            if self._tracks_programs:
                old = _held(region, chosen, new.dtype)
                changes = ~((old == new) | ((old != old) & (new != new))) & ~region.atomic[chosen]
                writer, reader = region.writer[chosen], region.reader[chosen]
                if ((writer > 0) & (writer != self._program) & changes).any():
                    self._add(
                        FaultKind.RACE, line, f"several programs store different values to one element of {region.name}"
                    )
                elif ((reader != 0) & (reader != self._program) & changes).any():
                    self._add(FaultKind.RACE, line, f"it changes elements of {region.name} that other programs read")
                order = numpy.argsort(chosen, kind="stable")
                same = chosen[order][1:] == chosen[order][:-1]
                if (same & (new[order][1:] != new[order][:-1])).any():
                    self._add(
                        FaultKind.RACE, line, f"several lanes store different values to one element of {region.name}"
                    )
                region.writer[chosen] = self._program
            region.written[chosen] = True

    def _add(self, kind: FaultKind, line: int, detail: str) -> None:
        self.faults.setdefault((kind, self._kernel, line), Fault(kind, line, self._kernel, detail))

    def _line(self) -> int:
        """The line of the user's file that is running."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                return frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return 0


def _held(region: Region, offsets: Any, kind: Any) -> Any:
    bytes_ = torch.tensor([], dtype=torch.uint8).set_(region.storage).numpy()
    return bytes_[offsets[:, None] + numpy.arange(kind.itemsize)].copy().view(kind)[:, 0]


def _numbers(tensor: torch.Tensor) -> Any:
    """The elements in memory, as the interpreter holds them."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.int16).numpy().view(numpy.uint16)
    if flat.element_size() == 1 and flat.is_floating_point():
        return flat.view(torch.uint8).numpy()
    return flat.numpy()
