"""Kernels side by side: one launch whose programs are those of several kernels that do not wait for one another.

A launch takes the host some 20 us and the device a few, and the last programs of a small kernel leave most of the device idle.
Each kernel becomes a function that is told which of its programs it is; the launch's first programs are those of the first one,
the next those of the second, and so on ("horizontal fusion": Li et al., CGO 2022, arXiv 2007.01277).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch, kernel_source
from mtmc_lsp.codegen.kernel.snippets import call_text
from mtmc_lsp.codegen.module.naming import Names
from mtmc_lsp.codegen.module.shared_kernels import SharedKernels
from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.schedule.schedule import MOST_BESIDE

END, WIDTH = "end_{}", "width_{}"
"""Where a part's programs end, and how many its grid's first dimension has."""
PROGRAM = ("program_0", "program_1")
"""A part's parameters for its program's place in its own grid; the second where that has two dimensions."""
NUMBERS = frozenset(text.format(i) for text in (END, WIDTH) for i in range(1, MOST_BESIDE + 1))
"""Names that the launcher gives these."""

Value = TypeVar("Value")


def side_by_side(name: str, parts: Sequence[Kernel], docstring: str) -> Kernel:
    """One kernel that does what ``parts`` do.

    It has as many warps as that part which has most: a part's tiles are spread over however many there are.

    Raises:
        CannotCode: a part needs the whole grid for itself.
    """
    if not 1 < len(parts) <= MOST_BESIDE:
        raise CannotCode(f"{len(parts)} kernels cannot be one launch; 2 to {MOST_BESIDE} can")
    # Those that do the same on other tensors are one function.
    functions = SharedKernels()
    own, parts = parts, [functions.one_for(part) for part in parts]
    made = _Joined()
    body = ["pid = tl.program_id(0)"]
    for i, part in enumerate(parts, 1):
        made.add(part, own[i - 1], i)
        before = END.format(i - 1)
        width = WIDTH.format(i)
        place, inner = ("pid", "pid") if i == 1 else (f"pid - {before}", f"(pid - {before})")
        places = [place] if len(part.grid) == 1 else [f"{inner} % {width}", f"{inner} // {width}"]
        head = "if" if i == 1 else "elif"
        body.append(f"{head} pid < {END.format(i)}:" if i < len(parts) else "else:")
        body.append(f"    {call_text(part.name, [*places, *made.arguments[-1]], '    ')}")
    body = "\n".join(body).split("\n")
    *passed, last = made.numbers
    numbers = {known: made.numbers[known] for known in passed}
    fixed = [own for own, size in made.sizes if made.is_fixed(own, size)]
    plain = [own for own, _ in made.sizes if own not in fixed]
    pointers = (made.tensors, made.read, made.outputs, made.written)
    header = [pointer for group in pointers for pointer, _ in group] + plain + list(numbers)
    header += [f"{own}: tl.constexpr" for own in (*fixed, *made.constexprs, *made.dynamic)]
    return Kernel(
        name=name,
        source=kernel_source(name, header, docstring, body, tuple(numbers)),
        tensors=tuple(made.tensors),
        outputs=tuple(made.outputs),
        sizes=tuple((own, dict(made.sizes)[own]) for own in (*plain, *fixed)),
        constexprs=made.constexprs,
        grid=(made.numbers[last],),
        grid_sizes=made.grid_sizes,
        num_warps=max(part.num_warps for part in parts),
        num_stages=max(part.num_stages for part in parts),
        dynamic=made.dynamic,
        limits=tuple(dict.fromkeys(limit for part in parts for limit in part.limits)),
        scratch_written=tuple(made.written),
        scratch_read=tuple(made.read),
        described=tuple(dict.fromkeys(prim for part in parts for prim in part.described)),
        static=frozenset(made.static),
        numbers=numbers,
        functions={part.name: _as_function(part) for part in parts},
    )


@dataclass
class _Joined:
    """The parameters of all parts, each under a name of its own; what several parts are given is one parameter."""

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
    arguments: list[list[str]] = field(default_factory=list)
    """Of the call of each part, in the order of its parameters."""
    names: Names = field(default_factory=lambda: Names(frozenset({"tl", "triton", "pid", *NUMBERS})))

    def add(self, part: Kernel, named: Kernel, number: int) -> None:
        """Take in a part's parameters, under the names that they have in ``named``, which does the same."""
        own: list[str] = [self._shared(self.tensors, name, prim) for name, prim in named.tensors]
        own += [self._shared(self.read, name, scratch) for name, scratch in named.scratch_read]
        own += [self._shared(self.outputs, name, ref) for name, ref in named.outputs]
        own += [self._shared(self.written, name, scratch) for name, scratch in named.scratch_written]
        own += [self._size(part, name, size) for name, size in part.sizes]
        for name, value in part.constexprs.items():
            if self.constexprs.get(name) != value or isinstance(value, bool) != isinstance(self.constexprs[name], bool):
                name = self.names.unique(name)
                self.constexprs[name] = value
            own.append(name)
        renamed = {name: self._grid_size(name, size, number) for name, size in part.grid_sizes.items()}
        for name, text in part.dynamic.items():
            text = _renamed(text, renamed)
            if self.dynamic.get(name) != text:
                name = self.names.unique(name)
                self.dynamic[name] = text
            own.append(name)
        self.arguments.append(own)
        first, *rest = (_renamed(text, renamed) for text in part.grid)
        if len(rest) > 1 or part.numbers:
            raise CannotCode(f"{part.name} needs the whole grid for itself")
        if rest:
            width = WIDTH.format(number)
            self.numbers[width] = first
            first = (
                f"{width} * {rest[0]}" if re.fullmatch(r"[\w.]+(\([^()]*\))?", rest[0]) else f"{width} * ({rest[0]})"
            )
        before = f"{END.format(number - 1)} + " if number > 1 else ""
        self.numbers[END.format(number)] = before + first

    def is_fixed(self, name: str, size: Size) -> bool:
        """Whether a size is a ``tl.constexpr``."""
        return size.is_constant or name in self.static

    def _shared(self, known: list[tuple[str, Value]], name: str, value: Value) -> str:
        found = next((own for own, other in known if other == value), None)
        if found is None:
            found = self.names.unique(name)
            known.append((found, value))
        return found

    def _size(self, part: Kernel, name: str, size: Size) -> str:
        fixed = part.passed_as_constant(name, size)
        for own, other in self.sizes:
            if other == size and self.is_fixed(own, size) == fixed:
                return own
        own = self.names.unique(name)
        self.sizes.append((own, size))
        if fixed and not size.is_constant:
            self.static.add(own)
        return own

    def _grid_size(self, name: str, size: Size, number: int) -> str:
        if self.grid_sizes.get(name, size) != size:
            name = f"{name}_{number}"
        self.grid_sizes[name] = size
        return name


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found[0], found[0]), text)


def _as_function(part: Kernel) -> str:
    """A kernel's text with its program's place as parameters."""
    source = part.source
    if (
        "tl.num_programs(" in source
        or not source.startswith("@triton.jit\n")
        or any(re.search(rf"\b{name}\b", source) for name in PROGRAM)
    ):
        raise CannotCode(f"{part.name} needs the whole grid for itself")
    names = PROGRAM[: len(part.grid)]
    for axis, name in enumerate(names):
        source = source.replace(f"tl.program_id({axis})", name)
    if "tl.program_id(" in source:
        raise CannotCode(f"{part.name} needs the whole grid for itself")
    head, bracket, rest = source.partition(f"def {part.name}(")
    gap = "\n    " if rest.startswith("\n") else ""
    return head + bracket + "".join(f"{gap}{name}," + ("" if gap else " ") for name in names) + rest
