"""Which configurations a region's kernel can have, and the one function that changes a plan's configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.ir.attention_mask import limited_attention_band
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.loops.chunks import chunk_form
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.loops.scan import scan_form
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import CannotFuse, Region, RegionKind, product_in, products_in
from mtmc_lsp.schedule.configs import (
    AttentionConfig,
    IllegalConfig,
    KernelConfig,
    LoopConfig,
    LoopOrder,
    MatmulConfig,
    PrecisionMode,
    RecurrentConfig,
    TileConfig,
    field_names,
)
from mtmc_lsp.schedule.loop_configs import MOST_CHUNK_ELEMENTS, key_block
from mtmc_lsp.schedule.matmul_configs import can_scale
from mtmc_lsp.schedule.schedule import KernelPlan

CONFIG_TYPES: Mapping[RegionKind, type[KernelConfig]] = {
    RegionKind.MAP: TileConfig,
    RegionKind.REDUCE: TileConfig,
    RegionKind.SCAN: TileConfig,
    RegionKind.MATMUL: MatmulConfig,
    RegionKind.ATTENTION: AttentionConfig,
    RegionKind.ATTENTION_GRADIENT: AttentionConfig,
    RegionKind.RECURRENT: RecurrentConfig,
    RegionKind.LOOP: LoopConfig,
}
KIND_NAMES = {RegionKind.MAP: "elementwise", RegionKind.REDUCE: "reduction", RegionKind.MATMUL: "product"}
"""Kinds with another name in messages."""


def kind_word(kind: RegionKind) -> str:
    """The kind's name in messages."""
    return KIND_NAMES.get(kind, kind.value)


def a_kernel(kind: RegionKind) -> str:
    """``a product kernel``, ``an elementwise kernel``."""
    word = kind_word(kind)
    return f"{'an' if word[0] in 'aeio' else 'a'} {word} kernel"


def decoded(ir: KernelIR, region: Region, data: object) -> KernelConfig:
    """The configuration of a region's kernel from JSON data; missing fields have their defaults.

    Raises:
        IllegalConfig: the data is not a configuration of this kind of kernel.
    """
    try:
        config = from_json(CONFIG_TYPES[region.kind], data)
    except TypeError as reason:
        raise IllegalConfig(f"the configuration does not fit {a_kernel(region.kind)}: {reason}") from None
    _check_kind(ir, region, config)
    return config


def reconfigured(ir: KernelIR, region: Region, plan: KernelPlan, changes: Mapping[str, object]) -> KernelPlan:
    """A kernel with some choices changed. All actions that change a configuration call this function.

    Args:
        changes: field to value, as JSON data.

    Raises:
        IllegalConfig: the kernel has no such choice, or the value is not legal; the message says which one is.
    """
    names = field_names(plan.config)
    if unknown := [name for name in changes if name not in names]:
        choices = ", ".join(names)
        raise IllegalConfig(f"{a_kernel(region.kind)} has no {unknown[0]} to choose; its choices are {choices}")
    try:
        config = from_json(type(plan.config), {**to_json(plan.config), **changes})
    except TypeError as reason:
        raise IllegalConfig(str(reason)) from None
    _check(ir, region, config, changes)
    return replace(plan, config=config)


def _check(ir: KernelIR, region: Region, config: KernelConfig, changed: Collection[str]) -> None:
    """Check the changed choices against the region.

    Raises:
        IllegalConfig: the region's kernel cannot have one of them.
    """
    word = a_kernel(region.kind)
    _check_kind(ir, region, config)
    parts, block = _parts(config)
    terms = region.columns.value(ir.graph.sizes)
    if {"split", "split_k"} & set(changed) and parts > max(1, -(-terms // block)):
        name = "split_k" if isinstance(config, MatmulConfig) else "split"
        raise IllegalConfig(
            f"{name} cannot be {parts}: {parts} parts of {terms} in blocks of {block} would leave some empty"
        )
    if isinstance(config, (TileConfig, MatmulConfig)) and config.persist and not region.parallel_axes:
        raise IllegalConfig(f"persist cannot be {config.persist}: there are no rows to compute one after another")
    if not isinstance(config, TileConfig):
        return
    if "loop" in changed and config.loop and region.kind is RegionKind.MAP:
        raise IllegalConfig("loop cannot be True: an elementwise kernel has nothing to loop over")
    if "order" in changed and config.order is LoopOrder.COLUMNS and not has_order(region):
        raise IllegalConfig(f"order cannot be 'columns': {word} over these axes has rows alone")


def _check_kind(ir: KernelIR, region: Region, config: KernelConfig) -> None:
    """Check the rules for all configurations of the region's kernel.

    Raises:
        IllegalConfig: the kernel would compute something else, or not compile.
    """
    if isinstance(config, MatmulConfig):
        dtype = ir.prims[product_in(ir, region).inputs[0]].dtype
        if config.precision is PrecisionMode.NATIVE and dtype in ("float32", "float64"):
            raise IllegalConfig(f"precision cannot be 'native': the operands are {dtype}, which has other modes")
        if config.precision is PrecisionMode.FP16_SCALED and not can_scale(ir, product_in(ir, region)):
            raise IllegalConfig(
                "precision cannot be 'fp16-scaled': that is for float32 products of at least 32 rows that your code runs in TF32"
            )
        if config.is_split and (count := len(products_in(ir, region))) > 1:
            name, value = ("stream_k", config.stream_k) if config.stream_k else ("split_k", config.split_k)
            raise IllegalConfig(f"{name} cannot be {value}: the kernel computes {count} products")
    if isinstance(config, AttentionConfig) and config.is_split and region.kind is RegionKind.ATTENTION_GRADIENT:
        raise IllegalConfig(f"split cannot be {config.split}: kernels for gradients of an attention are not split")
    if isinstance(config, AttentionConfig) and config.is_split and limited_attention_band(ir, region) is not None:
        raise IllegalConfig(f"split cannot be {config.split}: a mask limits the keys of each query")
    if isinstance(config, LoopConfig) and config.is_scan:
        form = loop_in(ir, region)
        try:
            scan_form(form)
        except CannotFuse as reason:
            raise IllegalConfig(f"steps cannot be {config.steps}: {reason}") from None
        columns = form.region.columns.value(ir.graph.sizes)
        if config.block < columns:
            raise IllegalConfig(f"block cannot be {config.block}: a reduction in the body needs all {columns} columns")
    if isinstance(config, LoopConfig) and config.is_chunked:
        form = loop_in(ir, region)
        try:
            chunk_form(form)
        except CannotFuse as reason:
            raise IllegalConfig(f"chunk cannot be {config.chunk}: {reason}") from None
        if max(config.chunk, config.block) * key_block(form) > MOST_CHUNK_ELEMENTS:
            raise IllegalConfig(
                f"chunk and block cannot be {config.chunk} and {config.block}: with {key_block(form)} channels of the key, "
                f"a tile has more than {MOST_CHUNK_ELEMENTS} elements"
            )
    if isinstance(config, LoopConfig) and config.is_stepwise:
        form = loop_in(ir, region)
        why = form.against_launches if isinstance(form, CellForm) else "an iteration multiplies its state by no matrix"
        if why:
            raise IllegalConfig(f"depth cannot be {config.depth}: {why}")
    if isinstance(config, TileConfig) and region.sums:
        _check_column_sums(ir, region, config)
    if isinstance(config, TileConfig) and config.is_split and region.kind is not RegionKind.REDUCE:
        raise IllegalConfig(f"split cannot be {config.split}: {a_kernel(region.kind)} cannot be split")


def _check_column_sums(ir: KernelIR, region: Region, config: TileConfig) -> None:
    """Check the rules for a kernel that walks rows and sums over all of them.

    Raises:
        IllegalConfig: its programs would not hold whole rows, or have no fixed number.
    """
    columns = region.columns.value(ir.graph.sizes)
    why = "the kernel sums over the rows that each of its programs walks"
    if config.loop or config.block < columns:
        raise IllegalConfig(
            f"loop and block cannot be {config.loop} and {config.block}: {why}, with all {columns} columns"
        )
    if config.is_split:
        raise IllegalConfig(f"split cannot be {config.split}: {why}")
    if not config.persist:
        raise IllegalConfig(f"persist cannot be 0: {why}")


def has_order(region: Region) -> bool:
    """Whether the programs of a region's kernel may advance along rows or columns first."""
    return region.kind is RegionKind.MAP and len(region.parallel_axes) > 1


def _parts(config: KernelConfig) -> tuple[int, int]:
    """Parts of each sum, and the terms that a loop iteration adds."""
    if isinstance(config, TileConfig):
        return config.split, config.block
    if isinstance(config, AttentionConfig):
        return config.split, config.block_n
    return (config.split_k, config.block_k) if isinstance(config, MatmulConfig) else (1, 1)
