"""How a kernel runs: one frozen dataclass of choices per kind of kernel.

A configuration is complete: it states every choice, also those that are at their default, so that a stored schedule renders the
same code when a default changes. Each field's type holds its legal range; rules that involve several fields are in
``__post_init__``. Rules that need the region are in :mod:`mtmc_lsp.schedule.legality`, the first choices in
:mod:`mtmc_lsp.schedule.tile_configs`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, ClassVar, TypeAlias, get_args, get_origin, get_type_hints

MOST_ELEMENTS = 65536
"""Elements of the largest tile of a tile kernel."""
MOST_STREAM_PROGRAMS = 8192
"""Programs of a stream-K product: up to this number, offsets into their partial sums fit into 32 bits for any tile."""


LEAST_STEPS = 16
"""Fewest iterations of an associative scan over time steps."""
LEAST_DEPTH = 16
"""Fewest columns of the state that a program multiplies at once, in a launch for each iteration."""
MOST_CHUNK = 128
"""Most iterations of a chunk that is computed by products: the products of all pairs stay in registers."""


class IllegalConfig(ValueError):
    """A choice that a kernel cannot have; the message names the field, the value and what is legal."""


class PrecisionMode(Enum):
    """How a kernel computes matrix products."""

    NATIVE = "native"
    """Tensor cores on 16-bit operands, sums in float32."""
    IEEE = "ieee"
    """float32 (or float64) units."""
    TF32 = "tf32"
    FP16_SCALED = "fp16-scaled"
    """For products that the user's code runs in TF32. Rows of the left operand and columns of the right one are scaled by powers
    of two and rounded to float16, which has as many significand bits as TF32, before the product."""
    TF32X3 = "tf32x3"
    """Tensor cores on float32 operands that the compiler splits into two TF32 parts."""
    FP16X3 = "fp16x3"
    """Operands are scaled and split into two float16 halves before the product. fp32 units add pieces of the sum: tensor cores
    round every addition towards zero, so their error grows with K, most of all where terms do not cancel."""
    FP16X3_SHORT = "fp16x3-short"
    """Like :attr:`FP16X3` with pieces of half the length: as exact as a float32 product, 5% slower."""
    FP16X3_PROMOTED = "fp16x3-promoted"
    """For operands that are split on load, or that are float16 pairs already: each block of K is a piece."""


SPLIT_PRECISION_MODES = (PrecisionMode.FP16X3, PrecisionMode.FP16X3_SHORT, PrecisionMode.FP16X3_PROMOTED)
"""Modes that split float32 operands into float16 halves, fastest first."""
PRE_SPLIT_MODES = (PrecisionMode.FP16X3, PrecisionMode.FP16X3_SHORT)
"""Modes whose operands are split by kernels that run before the product's kernel."""
CONVERTED_MODES = (*PRE_SPLIT_MODES, PrecisionMode.FP16_SCALED)
"""Modes whose operands are written as scaled float16 numbers by kernels that run before the product's kernel."""


class LoopOrder(Enum):
    """Whether consecutive programs of an elementwise kernel advance along rows or columns of the result."""

    ROWS = "rows"
    COLUMNS = "columns"


class SplitOnLoad(Enum):
    """Which operands of a product the kernel splits into float16 halves on load."""

    LEFT = "left"
    RIGHT = "right"
    BOTH = "both"

    @staticmethod
    def of(side: int) -> SplitOnLoad:
        """The operand at ``side`` alone: 0 is the left one, 1 the right one."""
        return (SplitOnLoad.LEFT, SplitOnLoad.RIGHT)[side]

    def includes(self, side: int) -> bool:
        """Whether the operand at ``side`` is split on load."""
        return self in (SplitOnLoad.BOTH, SplitOnLoad.of(side))


@dataclass(frozen=True)
class Range:
    """The legal values of a number."""

    least: int
    most: int
    power_of_two: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            return False
        return not self.power_of_two or value & (value - 1) == 0

    def __str__(self) -> str:
        return f"a {'power of two' if self.power_of_two else 'whole number'} from {self.least} to {self.most}"


Power: TypeAlias = Annotated[int, Range(1, MOST_ELEMENTS, power_of_two=True)]
Warps: TypeAlias = Annotated[int, Range(1, 32, power_of_two=True)]
"""Warps of a program (32 threads; AMD: 64)."""
Stages: TypeAlias = Annotated[int, Range(1, 16)]
"""Blocks of a loop that are in flight at once: loads run ``stages - 1`` blocks ahead."""
Side: TypeAlias = Annotated[int, Range(16, 256, power_of_two=True)]
"""One side of a product's tile, in elements: tensor cores need 16."""
Programs: TypeAlias = Annotated[int, Range(0, 2**31 - 1)]
"""Programs of a persistent kernel; 0 where each program computes one tile."""


_RANGES: dict[type, dict[str, Range]] = {}
"""Cache of :func:`_ranges`: reading type hints takes longer than checking them."""


def _ranges(kind: type) -> dict[str, Range]:
    """The legal values of a configuration's numbers."""
    if kind not in _RANGES:
        hints = get_type_hints(kind, include_extras=True)
        annotated = {name: get_args(hint)[1] for name, hint in hints.items() if get_origin(hint) is Annotated}
        _RANGES[kind] = {name: legal for name, legal in annotated.items() if isinstance(legal, Range)}
    return _RANGES[kind]


class _Config:
    """Checks ranges of fields."""

    def __post_init__(self) -> None:
        for name, legal in _ranges(type(self)).items():
            value = getattr(self, name)
            if value not in legal:
                raise IllegalConfig(f"{name} cannot be {value!r}; it must be {legal}")


@dataclass(frozen=True)
class TileConfig(_Config):
    """An elementwise kernel, a reduction or a scan: programs that hold tiles of rows and columns."""

    json_tag: ClassVar[str] = "tile"
    rows: Power = 1
    """Rows of a tile."""
    block: Power = 1024
    """Columns of a tile."""
    loop: bool = False
    """Whether a program loops over blocks of columns (reductions; scans always do) instead of holding all columns."""
    warps: Warps = 4
    stages: Stages = 2
    split: Power = 1
    """Programs that share each row of a reduction; another kernel combines their parts."""
    persist: Programs = 0
    order: LoopOrder = LoopOrder.ROWS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elements > MOST_ELEMENTS:
            tile = f"{self.rows} rows x {self.block} columns"
            raise IllegalConfig(f"rows and block cannot be {tile}: a tile has at most {MOST_ELEMENTS} elements")
        if self.persist and self.split > 1:
            raise IllegalConfig(
                f"persist cannot be {self.persist}: a split kernel has too few tiles for persistent programs"
            )
        if self.persist and self.order is LoopOrder.COLUMNS:
            raise IllegalConfig(
                f"persist cannot be {self.persist}: persistent programs cannot advance along columns first"
            )

    @property
    def elements(self) -> int:
        """Elements of a tile."""
        return self.rows * self.block

    @property
    def is_split(self) -> bool:
        """Whether the kernel is several launches; the last one combines the partial results."""
        return self.split > 1


class _Blocks:
    """Common to kernels with products."""

    block_m: Side
    block_n: Side

    @property
    def elements(self) -> int:
        """Elements of a tile of the result."""
        return self.block_m * self.block_n


@dataclass(frozen=True)
class MatmulConfig(_Blocks, _Config):
    """A matrix product or a convolution."""

    json_tag: ClassVar[str] = "matmul"
    block_m: Side
    """Rows of the result's tile."""
    block_n: Side
    """Columns of the result's tile."""
    block_k: Side
    """Terms of the sum that a step of the loop adds."""
    group_m: Power
    """Rows of tiles that programs complete before the next columns, so that the L2 cache serves the operands."""
    warps: Warps
    stages: Stages
    precision: PrecisionMode
    split_on_load: SplitOnLoad | None = None
    """Operands that are split as they are loaded; None where none is. See :mod:`mtmc_lsp.schedule.split_on_load`."""
    tma: bool = False
    """Whether the Tensor Memory Accelerator loads tiles of the operands, where their layout allows it."""
    kernel_positions: bool = False
    """Whether a convolution loops over the positions of its kernel, with a block of channels as ``block_k``."""
    split_k: Annotated[int, Range(1, 2**15, power_of_two=True)] = 1
    """Parts of K (split-K), each summed by separate programs; another kernel adds the parts."""
    stream_k: Annotated[int, Range(0, MOST_STREAM_PROGRAMS)] = 0
    """Programs that share the K blocks of the last wave of tiles (stream-K); 0 without stream-K."""
    persist: Programs = 0
    flatten: bool = False
    """Whether a persistent program's loops over tiles and K are compiled as one, which loads the next tile while this one is
    stored. No effect where ``persist`` is 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision is PrecisionMode.TF32X3:
            raise IllegalConfig("precision cannot be 'tf32x3': only recurrent layers have this mode")
        if self.split_on_load and self.precision is not PrecisionMode.FP16X3_PROMOTED:
            needed = PrecisionMode.FP16X3_PROMOTED.value
            raise IllegalConfig(
                f"split_on_load cannot be {self.split_on_load.value!r}: that needs the precision {needed!r}"
            )
        if self.split_k > 1 and self.stream_k:
            raise IllegalConfig(
                f"stream_k cannot be {self.stream_k}: the product is split into {self.split_k} parts of K"
            )
        if self.is_split and self.splits_one_operand_on_load:
            name, value = ("stream_k", self.stream_k) if self.stream_k else ("split_k", self.split_k)
            raise IllegalConfig(
                f"{name} cannot be {value}: a kernel that splits one operand on load sums all of K itself"
            )
        if self.persist and self.split_k > 1:
            raise IllegalConfig(
                f"persist cannot be {self.persist}: a split kernel has too few tiles for persistent programs"
            )
        if self.persist and self.stream_k:
            raise IllegalConfig(f"persist cannot be {self.persist}: the programs of stream-K are persistent already")

    @property
    def is_split(self) -> bool:
        """Whether programs share the sum of a tile, and another kernel adds the parts."""
        return self.split_k > 1 or self.stream_k > 0

    @property
    def splits_one_operand_on_load(self) -> bool:
        """Whether one operand is split on load, and the other one before."""
        return self.split_on_load in (SplitOnLoad.LEFT, SplitOnLoad.RIGHT)


@dataclass(frozen=True)
class AttentionConfig(_Blocks, _Config):
    """An attention: each program holds a block of queries and loops over blocks of keys."""

    json_tag: ClassVar[str] = "attention"
    block_m: Side
    """Queries of a program."""
    block_n: Side
    """Keys of a block."""
    warps: Warps
    stages: Stages
    split: Power = 1
    """Programs that share the keys of each block of queries; another kernel combines their parts."""

    @property
    def is_split(self) -> bool:
        """Whether programs share the keys of a query."""
        return self.split > 1


@dataclass(frozen=True)
class RecurrentConfig(_Blocks, _Config):
    """Recurrent layers, one launch for each group of steps that do not depend on one another."""

    json_tag: ClassVar[str] = "recurrent"
    block_m: Side
    """Samples of the batch that a program computes."""
    block_n: Side
    """Columns of a tile: one per unit, or four where the cell has gates."""
    block_k: Side
    """Units of the previous state that a step of the loop reads."""
    warps: Warps
    stages: Stages
    precision: PrecisionMode
    """``tf32x3`` or ``ieee``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in (PrecisionMode.TF32X3, PrecisionMode.IEEE):
            raise IllegalConfig(f"precision cannot be {self.precision.value!r}; it must be 'tf32x3' or 'ieee'")


@dataclass(frozen=True)
class LoopConfig(_Config):
    """A loop over time steps: each program holds a tile of the states and runs all iterations, or scans chunks of them."""

    json_tag: ClassVar[str] = "loop"
    rows: Power
    """Rows of a tile."""
    block: Power
    """Columns of a tile; whole rows where the body has reductions."""
    warps: Warps
    stages: Stages
    steps: Power = 1
    """Iterations that a program computes at once, by an associative scan; 1: one after another."""
    segments: Annotated[int, Range(1, 256, power_of_two=True)] = 1
    """Programs that share the iterations of a tile; further kernels compute what each of them does to the states."""
    chunk: Power = 1
    """Iterations that a program computes by products of matrices; 1: one after another. ``block`` is the columns of values."""
    depth: Power = 1
    """Columns of the state that a program multiplies at once, where each iteration is a launch; 1: one launch for all."""
    precision: PrecisionMode = PrecisionMode.IEEE
    """Of float32 products where each iteration is a launch: ``tf32x3``, or ``ieee``, which is the user's setting elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows * self.block * self.steps > MOST_ELEMENTS:
            tile = f"{self.rows} rows x {self.block} columns x {self.steps} steps"
            raise IllegalConfig(f"rows, block and steps cannot be {tile}: a tile has at most {MOST_ELEMENTS} elements")
        if self.steps > 1 and self.rows > 1:
            raise IllegalConfig(f"rows cannot be {self.rows}: a program that scans {self.steps} steps has one row")
        if 1 < self.steps < LEAST_STEPS:
            raise IllegalConfig(f"steps cannot be {self.steps}; it must be 1 or at least {LEAST_STEPS}")
        if self.segments > 1 and not self.is_scan:
            raise IllegalConfig(
                f"segments cannot be {self.segments}: iterations that run one after another share no work"
            )
        if self.is_chunked:
            self._check_chunk()
        if self.is_stepwise and (self.is_scan or self.is_chunked):
            raise IllegalConfig(f"depth cannot be {self.depth}: a launch computes several iterations")
        if self.precision not in (PrecisionMode.TF32X3, PrecisionMode.IEEE):
            raise IllegalConfig(f"precision cannot be {self.precision.value!r}; it must be 'tf32x3' or 'ieee'")
        if self.precision is PrecisionMode.TF32X3 and not self.is_stepwise:
            raise IllegalConfig("precision cannot be 'tf32x3': one launch runs all iterations")
        if 1 < self.depth < LEAST_DEPTH:
            raise IllegalConfig(f"depth cannot be {self.depth}; it must be 1 or at least {LEAST_DEPTH}")

    def _check_chunk(self) -> None:
        if self.is_scan:
            raise IllegalConfig(
                f"chunk cannot be {self.chunk}: a program that scans {self.steps} steps computes no products"
            )
        if self.rows > 1:
            raise IllegalConfig(f"rows cannot be {self.rows}: a program that computes chunks of iterations has one row")
        if not LEAST_STEPS <= self.chunk <= MOST_CHUNK:
            raise IllegalConfig(f"chunk cannot be {self.chunk}; it must be 1, or {LEAST_STEPS} to {MOST_CHUNK}")
        if self.block < LEAST_STEPS:
            raise IllegalConfig(f"block cannot be {self.block}: products of chunks have at least {LEAST_STEPS} columns")

    @property
    def is_chunked(self) -> bool:
        """Whether a program computes chunks of iterations by products of matrices."""
        return self.chunk > 1

    @property
    def is_scan(self) -> bool:
        """Whether a program scans chunks of iterations."""
        return self.steps > 1

    @property
    def is_stepwise(self) -> bool:
        """Whether each iteration is a launch."""
        return self.depth > 1


KernelConfig: TypeAlias = TileConfig | MatmulConfig | AttentionConfig | RecurrentConfig | LoopConfig


def precision_of(config: KernelConfig) -> PrecisionMode | None:
    """The precision mode of a kernel's product; None for kernels that have no such choice."""
    if isinstance(config, LoopConfig):
        return config.precision if config.is_stepwise else None
    return config.precision if isinstance(config, (MatmulConfig, RecurrentConfig)) else None


def field_names(config: KernelConfig) -> list[str]:
    """The choices of a configuration."""
    return [field.name for field in fields(config)]
