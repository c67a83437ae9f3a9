"""Horizontal fusion: one launch runs the program instances of several independent kernels.

A launch costs about 20 us on the host and a few on the device, and the last program instances of a small kernel leave most of the
device idle. Each kernel becomes a device function that takes its program index as an argument. The first program instances of the
launch run the first kernel, the next ones the second, and so on (Li et al., CGO 2022, arXiv 2007.01277).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch, kernel_source, number_parameters
from mtmc_lsp.codegen.kernel.snippets import call_text
from mtmc_lsp.codegen.module.naming import Names
from mtmc_lsp.codegen.module.shared_kernels import SharedKernels
from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Number, Size
from mtmc_lsp.schedule.schedule import MOST_BESIDE

END, WIDTH = "end_{}", "width_{}"
"""Launcher variables: the end of a part's range of programs, and the first dimension of its grid."""
PROGRAM = ("program_0", "program_1")
"""Parameters of a part for its program indices; the second exists only for two-dimensional grids."""
NUMBERS = frozenset(text.format(i) for text in (END, WIDTH) for i in range(1, MOST_BESIDE + 1))
"""All launcher variables of this kind."""

Value = TypeVar("Value")


def side_by_side(name: str, parts: Sequence[Kernel], docstring: str) -> Kernel:
    """Fuse the kernels ``parts`` into one launch.

    It uses the largest number of warps of any part; Triton distributes each part's tiles over all warps.

    Raises:
        CannotCode: a part uses grid features that a fused launch does not support.
    """
    if not 1 < len(parts) <= MOST_BESIDE:
        raise CannotCode(f"cannot fuse {len(parts)} kernels into one launch; choose 2 to {MOST_BESIDE} kernels")
    # Equivalent parts on different tensors share one device function.
    functions = SharedKernels()
    original_parts, parts = parts, [functions.shared(part) for part in parts]
    combined = _CombinedParameters()
    body = ["pid = tl.program_id(0)"]
    for i, part in enumerate(parts, 1):
        combined.add(part, original_parts[i - 1], i)
        start = END.format(i - 1)
        width = WIDTH.format(i)
        index, inner = ("pid", "pid") if i == 1 else (f"pid - {start}", f"(pid - {start})")
        indices = [index] if len(part.grid) == 1 else [f"{inner} % {width}", f"{inner} // {width}"]
        head = "if" if i == 1 else "elif"
        body.append(f"{head} pid < {END.format(i)}:" if i < len(parts) else "else:")
        body.append(f"    {call_text(part.name, [*indices, *combined.arguments[-1]], '    ')}")
    body = "\n".join(body).split("\n")
    *passed_numbers, last = combined.numbers
    numbers = {number_name: combined.numbers[number_name] for number_name in passed_numbers}
    constant_sizes = [parameter for parameter, size in combined.sizes if combined.is_constexpr(parameter, size)]
    runtime_sizes = [parameter for parameter, _ in combined.sizes if parameter not in constant_sizes]
    pointers = (combined.tensors, combined.read, combined.outputs, combined.written)
    header = [pointer for group in pointers for pointer, _ in group] + runtime_sizes
    header += [*number_parameters(combined.run_time_numbers), *numbers]
    header += [f"{parameter}: tl.constexpr" for parameter in (*constant_sizes, *combined.constexprs, *combined.dynamic)]
    return Kernel(
        name=name,
        source=kernel_source(name, header, docstring, body, tuple(numbers)),
        tensors=tuple(combined.tensors),
        outputs=tuple(combined.outputs),
        sizes=tuple((parameter, dict(combined.sizes)[parameter]) for parameter in (*runtime_sizes, *constant_sizes)),
        constexprs=combined.constexprs,
        grid=(combined.numbers[last],),
        grid_sizes=combined.grid_sizes,
        num_warps=max(part.num_warps for part in parts),
        num_stages=max(part.num_stages for part in parts),
        dynamic=combined.dynamic,
        limits=tuple(dict.fromkeys(limit for part in parts for limit in part.limits)),
        scratch_written=tuple(combined.written),
        scratch_read=tuple(combined.read),
        described=tuple(dict.fromkeys(prim for part in parts for prim in part.described)),
        static=frozenset(combined.static),
        run_time_numbers=tuple(combined.run_time_numbers),
        numbers=numbers,
        functions={part.name: _as_function(part) for part in parts},
    )


@dataclass
class _CombinedParameters:
    """The combined parameters of all parts, under unique names; equal arguments share a parameter."""

    tensors: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[tuple[str, Ref]] = field(default_factory=list)
    read: list[tuple[str, Scratch]] = field(default_factory=list)
    written: list[tuple[str, Scratch]] = field(default_factory=list)
    sizes: list[tuple[str, Size]] = field(default_factory=list)
    static: set[str] = field(default_factory=set)
    constexprs: dict[str, int | bool | str] = field(default_factory=dict)
    dynamic: dict[str, str] = field(default_factory=dict)
    grid_sizes: dict[str, Size] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    run_time_numbers: list[tuple[str, Number, str]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)
    """Arguments of each part's call, in the order of its parameters."""
    names: Names = field(default_factory=lambda: Names(frozenset({"tl", "triton", "pid", *NUMBERS})))

    def add(self, part: Kernel, named: Kernel, number: int) -> None:
        """Add a part's parameters under their names in ``named``, the equivalent kernel before deduplication."""
        arguments_of_part: list[str] = [self._shared(self.tensors, name, prim) for name, prim in named.tensors]
        arguments_of_part += [self._shared(self.read, name, scratch) for name, scratch in named.scratch_read]
        arguments_of_part += [self._shared(self.outputs, name, ref) for name, ref in named.outputs]
        arguments_of_part += [self._shared(self.written, name, scratch) for name, scratch in named.scratch_written]
        sizes = {name: self._size(part, name, size) for name, size in part.sizes}
        arguments_of_part += [sizes[name] for name, size in part.sizes if not part.passed_as_constant(name, size)]
        arguments_of_part += [self._number(*item) for item in named.run_time_numbers]
        arguments_of_part += [sizes[name] for name, size in part.sizes if part.passed_as_constant(name, size)]
        for name, value in part.constexprs.items():
            if self.constexprs.get(name) != value or isinstance(value, bool) != isinstance(self.constexprs[name], bool):
                name = self.names.unique(name)
                self.constexprs[name] = value
            arguments_of_part.append(name)
        renamed = {name: self._grid_size(name, size, number) for name, size in part.grid_sizes.items()}
        for name, text in part.dynamic.items():
            text = _renamed(text, renamed)
            if self.dynamic.get(name) != text:
                name = self.names.unique(name)
                self.dynamic[name] = text
            arguments_of_part.append(name)
        self.arguments.append(arguments_of_part)
        first, *rest = (_renamed(text, renamed) for text in part.grid)
        if len(rest) > 1 or part.numbers or part.repeat or part.passes:
            raise CannotCode(
                f"{part.name} cannot share a launch, because it depends on its whole grid; launch it separately"
            )
        if rest:
            width = WIDTH.format(number)
            self.numbers[width] = first
            first = (
                f"{width} * {rest[0]}" if re.fullmatch(r"[\w.]+(\([^()]*\))?", rest[0]) else f"{width} * ({rest[0]})"
            )
        start = f"{END.format(number - 1)} + " if number > 1 else ""
        self.numbers[END.format(number)] = start + first

    def is_constexpr(self, name: str, size: Size) -> bool:
        """Whether a size is a ``tl.constexpr``."""
        return size.is_constant or name in self.static

    def _shared(self, known: list[tuple[str, Value]], name: str, value: Value) -> str:
        parameter = next((existing for existing, other in known if other == value), None)
        if parameter is None:
            parameter = self.names.unique(name)
            known.append((parameter, value))
        return parameter

    def _number(self, name: str, number: Number, dtype: str) -> str:
        known = next((other for other, *same in self.run_time_numbers if same == [number, dtype]), None)
        if known is None:
            known = self.names.unique(name)
            self.run_time_numbers.append((known, number, dtype))
        return known

    def _size(self, part: Kernel, name: str, size: Size) -> str:
        is_fixed_size = part.passed_as_constant(name, size)
        for parameter, other in self.sizes:
            if other == size and self.is_constexpr(parameter, size) == is_fixed_size:
                return parameter
        parameter = self.names.unique(name)
        self.sizes.append((parameter, size))
        if is_fixed_size and not size.is_constant:
            self.static.add(parameter)
        return parameter

    def _grid_size(self, name: str, size: Size, number: int) -> str:
        if self.grid_sizes.get(name, size) != size:
            name = f"{name}_{number}"
        self.grid_sizes[name] = size
        return name


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), text)


def _as_function(part: Kernel) -> str:
    """A kernel's source as a device function with program indices as parameters."""
    source = part.source
    if (
        "tl.num_programs(" in source
        or not source.startswith("@triton.jit\n")
        or any(re.search(rf"\b{name}\b", source) for name in PROGRAM)
    ):
        raise CannotCode(
            f"{part.name} cannot share a launch, because it depends on its whole grid; launch it separately"
        )
    names = PROGRAM[: len(part.grid)]
    for axis, name in enumerate(names):
        source = source.replace(f"tl.program_id({axis})", name)
    if "tl.program_id(" in source:
        raise CannotCode(
            f"{part.name} cannot share a launch, because it depends on its whole grid; launch it separately"
        )
    head, bracket, rest = source.partition(f"def {part.name}(")
    indent, space = ("\n    ", "") if rest.startswith("\n") else ("", " ")
    return f"{head}{bracket}{indent}{', '.join(names)},{space}{rest}"
