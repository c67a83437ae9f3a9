"""A finished kernel: its source and how the launcher calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mtmc_lsp.codegen.kernel.parameters import NUMBER_DTYPES, Parameters
from mtmc_lsp.codegen.kernel.snippets import def_lines
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.sizes import Number, Size

MAX_GRID_Y = 65535
"""Maximum size of a grid's second and third dimension."""


@dataclass(frozen=True)
class Scratch:
    """A temporary buffer that one kernel of a region writes and a later one reads."""

    name: str
    shape: tuple[Size, ...]
    dtype: str


@dataclass(frozen=True)
class Kernel:
    """One ``@triton.jit`` function."""

    name: str
    source: str
    """The source from the decorator to the last line, with a newline at the end."""
    tensors: tuple[tuple[str, str], ...]
    """``(parameter, primitive)`` for each pointer that is read; the primitive is ``seed`` for the random seed."""
    outputs: tuple[tuple[str, Ref], ...]
    """``(parameter, graph value)`` for each pointer that is written."""
    sizes: tuple[tuple[str, Size], ...]
    """``(parameter, size)``. Constant and ``static`` sizes are ``tl.constexpr``."""
    constexprs: Mapping[str, int | bool | str]
    grid: tuple[str, ...]
    """One Python expression over the launcher's names per grid dimension."""
    grid_sizes: Mapping[str, Size]
    """Names that grid expressions use, such as ``n_rows``, and their sizes."""
    num_warps: int
    num_stages: int
    dynamic: Mapping[str, str] = field(default_factory=dict)
    """Constexpr parameters that the launcher computes: name to Python, such as ``n_cols % 128 == 0``."""
    limits: tuple[str, ...] = ()
    """Conditions on named sizes that the guard must check for this kernel."""
    scratch_written: tuple[tuple[str, Scratch], ...] = ()
    scratch_read: tuple[tuple[str, Scratch], ...] = ()
    described: tuple[str, ...] = ()
    """Primitives with tensor descriptors; the guard must check the alignment of their buffers."""
    static: frozenset[str] = frozenset()
    """Size parameters that are compile-time constants although the sizes may differ between calls."""
    run_time_numbers: tuple[tuple[str, Number, str], ...] = ()
    """``(parameter, number, dtype)`` for each number that is known at run time. These parameters follow the sizes."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Further integer parameters that the launcher computes: name to Python over ``grid_sizes`` and earlier entries."""
    warps_text: str = ""
    """The number of warps as Python over ``grid_sizes``, for the launcher; empty where it is ``num_warps`` for all sizes."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """Device functions that only this kernel calls: name to source."""
    repeat: tuple[str, Size] | None = None
    """The parameter that counts launches, and their number; ``None`` for one launch. The parameter follows the sizes."""
    passes: tuple[str, tuple[bool, ...]] | None = None
    """A ``tl.constexpr`` and its values, if there is one launch for each of them, in this order."""
    initial: tuple[tuple[str, float | str], ...] = ()
    """``(parameter, number or primitive)``: what the first slice of a scratch buffer is before the first launch."""
    copied: Mapping[str, TensorType] = field(default_factory=dict)
    """For each pointer to a contiguous copy that the launcher makes: the view of the tensor's memory that it copies."""

    def passed_as_constant(self, parameter: str, size: Size) -> bool:
        """Whether a size is a ``tl.constexpr``."""
        return size.is_constant or parameter in self.static


def assemble(
    name: str,
    parameters: Parameters,
    constexprs: Mapping[str, int | bool | str],
    docstring: str,
    body: list[str],
    *,
    grid: tuple[str, ...],
    grid_sizes: Mapping[str, Size],
    num_warps: int,
    num_stages: int,
    dynamic: Mapping[str, str] | None = None,
    limits: tuple[str, ...] = (),
    scratch_written: tuple[tuple[str, Scratch], ...] = (),
    scratch_read: tuple[tuple[str, Scratch], ...] = (),
    described: tuple[str, ...] = (),
    repeat: tuple[str, Size] | None = None,
    passes: tuple[str, tuple[bool, ...]] | None = None,
    copied: Mapping[str, TensorType] | None = None,
) -> Kernel:
    """Assemble a kernel from its parts. Parameters are ordered: pointers, outputs, sizes, run-time numbers, constexprs."""
    tensors = tuple((pointer, prim) for prim, pointer in parameters.tensors.items())
    outputs = tuple((pointer, ref) for ref, pointer in parameters.outputs.items())
    sizes = tuple(parameters.used_sizes.items())
    fixed = [n for n, size in sizes if parameters.is_static(size)]
    plain = [n for n, _ in sizes if n not in fixed]
    header = [p for group in (tensors, scratch_read, outputs, scratch_written) for p, _ in group] + plain
    run_time_numbers = tuple((parameter, number, dtype) for (number, dtype), parameter in parameters.numbers.items())
    header += number_parameters(run_time_numbers)
    counter = [repeat[0]] if repeat is not None else []
    header += [*counter, *(f"{n}: tl.constexpr" for n in (*fixed, *constexprs, *(dynamic or {}), *(passes or ())[:1]))]
    varying = [p for p, _, dtype in run_time_numbers if dtype == "int64"]
    ordered = tuple((n, dict(sizes)[n]) for n in (*plain, *fixed))
    return Kernel(
        name=name,
        source=kernel_source(name, header, docstring, body, [*varying, *counter]),
        tensors=tensors,
        outputs=outputs,
        sizes=ordered,
        constexprs=constexprs,
        grid=grid,
        grid_sizes=grid_sizes,
        num_warps=num_warps,
        num_stages=num_stages,
        dynamic=dynamic or {},
        limits=tuple(dict.fromkeys((*limits, *_grid_limits(grid, grid_sizes)))),
        scratch_written=scratch_written,
        scratch_read=scratch_read,
        described=described,
        static=frozenset(n for n in fixed if not dict(sizes)[n].is_constant),
        run_time_numbers=run_time_numbers,
        repeat=repeat,
        passes=passes,
        copied=copied or {},
    )


def _grid_limits(grid: tuple[str, ...], sizes: Mapping[str, Size]) -> Iterator[str]:
    """Limits of the grid's second and third dimension where these are sizes, such as that of a batch."""
    for size in (sizes[text] for text in grid[1:] if text in sizes):
        if not size.is_constant or size.constant > MAX_GRID_Y:
            yield f"{size} <= {MAX_GRID_Y}"


def number_parameters(numbers: Sequence[tuple[str, Number, str]]) -> list[str]:
    """The parameters of a kernel for run-time numbers, with the annotation of their type."""
    return [f"{parameter}{NUMBER_DTYPES[dtype]}" for parameter, _, dtype in numbers]


def kernel_source(name: str, header: list[str], docstring: str, body: list[str], varying: Sequence[str] = ()) -> str:
    """The source of a kernel. ``varying`` parameters are not specialised, so all their values share one compilation."""
    decorator = f"@triton.jit(do_not_specialize={list(varying)})".replace("'", '"') if varying else "@triton.jit"
    lines = [decorator, *def_lines(name, header), *_docstring(docstring)]
    lines += [f"    {line}" if line else "" for line in body]
    return "\n".join(lines) + "\n"


def _docstring(text: str) -> list[str]:
    lines = text.split("\n")
    if len(lines) == 1:
        return [f'    """{lines[0]}"""']
    return [f'    """{lines[0]}', *(f"    {line}" if line else "" for line in lines[1:]), '    """']
