"""How a kernel runs when it is first written, and which other ways are worth trying.

A configuration is a flat mapping. For tile kernels: ``rows`` (per program), ``block`` (columns per tile), ``loop`` (over blocks
of columns), ``warps``, ``stages``. For products: ``block_m``, ``block_n``, ``block_k``, ``group_m``, ``warps``, ``stages``,
``precision``. Also ``split`` (parts of a reduction's columns) and ``split_k`` (parts of a product's K), ``persist`` (programs
that do one piece of work after another) and ``order`` (``columns``: an elementwise kernel's programs run along columns first).
"""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.core.dtypes import ITEMSIZE, compute_dtype
from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.sizes import product
from mtmc_lsp.macro.axes import Axis
from mtmc_lsp.macro.prims import PrimOp, Program
from mtmc_lsp.macro.regions import Region, RegionKind

Config = dict[str, "int | str | bool"]

WHOLE_ROW_LIMIT = 16384
"""Columns up to which a row is held at once."""


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


def default_config(program: Program, region: Region) -> Config:
    """A sound first configuration for the workload's sizes."""
    if region.kind is RegionKind.MATMUL:
        return _product_config(program, region)
    if region.kind is RegionKind.ATTENTION:
        return {"block_m": 128, "block_n": 64, "warps": 8, "stages": 3}
    sizes = program.graph.sizes
    if region.kind is RegionKind.MAP:
        columns = region.kept[-1].size.value(sizes) if region.kept else 1
        block = min(1024, next_power_of_two(columns)) if len(region.kept) > 1 else 1024
        return {"rows": max(1, 1024 // block), "block": block, "warps": 4, "stages": 2}
    columns = region.columns.value(sizes)
    if _strided_columns(program, region):
        # Neighbouring rows lie densest: a tile of many rows reads them together.
        return _shared_out(program, region, {"rows": 64, "block": 16, "loop": True, "warps": 4, "stages": 2})
    whole = next_power_of_two(columns)
    if region.kind is RegionKind.SCAN:
        return {"rows": 1, "block": min(whole, 1024), "loop": True, "warps": 4, "stages": 2}
    if whole > WHOLE_ROW_LIMIT:
        return _shared_out(program, region, {"rows": 1, "block": 4096, "loop": True, "warps": 8, "stages": 2})
    rows = max(1, min(16, 1024 // whole))
    return {"rows": rows, "block": whole, "loop": False, "warps": _warps(rows * whole), "stages": 2}


FEW_PROGRAMS, FEW_TILES = 256, 128
"""With fewer programs (of a reduction, of a product) than this, each with a long sum, much of a large device would be idle."""
MANY_PROGRAMS = 512
"""About as many programs as a large device runs at once."""
LEAST_SHARED = 1 << 18
"""Elements of a reduction from which on several programs per row pay for the second kernel."""


def _shared_out(program: Program, region: Region, config: Config) -> Config:
    """The configuration, in parts where few programs would have all the work."""
    return {**config, **split_parts(program, region, config)} if region.kind is RegionKind.REDUCE else config


def split_parts(program: Program, region: Region, config: Mapping[str, int | str | bool]) -> Config:
    """How to split a reduction of few long rows; nothing where it has rows enough, or is small."""
    sizes = program.graph.sizes
    rows, columns = region.rows.value(sizes), region.columns.value(sizes)
    programs = -(-rows // int(config["rows"]))
    if programs >= FEW_PROGRAMS or rows * columns < LEAST_SHARED:
        return {}
    changes: Config = {}
    block = int(config["block"])
    if not config.get("loop"):
        block = min(block, 2048)
        changes = {"block": block, "warps": 8}
    # Each part walks a few blocks, so that a program's start is a small part of it.
    most = columns // (4 * block)
    parts = min(MANY_PROGRAMS // programs, most)
    return {**changes, "split": 1 << (parts.bit_length() - 1)} if parts >= 2 else {}


def split_product_parts(program: Program, region: Region, config: Mapping[str, int | str | bool]) -> Config:
    """How to split a product of few tiles with a long sum; nothing where it has tiles enough."""
    sizes = program.graph.sizes
    prim = next(program.prims[name] for name in region.prims if program.prims[name].op is PrimOp.MATMUL)
    m, n = prim.shape[-2].value(sizes), prim.shape[-1].value(sizes)
    tiles = -(-m // int(config["block_m"])) * -(-n // int(config["block_n"])) * product(prim.shape[:-2]).value(sizes)
    depth = region.columns.value(sizes)
    parts = min(FEW_TILES // tiles, depth // (8 * int(config["block_k"])))
    return {"split_k": 1 << (parts.bit_length() - 1)} if parts >= 4 else {}


def _warps(elements: int) -> int:
    """Warps so that each thread holds about 16 elements."""
    return max(1, min(16, next_power_of_two(elements // 512)))


def _product_config(program: Program, region: Region) -> Config:
    prim = next(program.prims[name] for name in region.prims if program.prims[name].op is PrimOp.MATMUL)
    operand = program.prims[prim.inputs[0]].dtype
    half = ITEMSIZE[compute_dtype(operand)] != ITEMSIZE[operand]
    sizes = program.graph.sizes
    m, n = prim.shape[-2].value(sizes), prim.shape[-1].value(sizes)
    block_m = min(128, max(16, next_power_of_two(m)))
    block_n = min(256 if half else 128, max(16, next_power_of_two(n)))
    precision = "native" if half else program.graph.fp32_matmul
    config: Config = {
        "block_m": block_m,
        "block_n": block_n,
        "block_k": 64 if half else 32,
        "group_m": 8,
        "warps": 8 if block_m * block_n >= 128 * 128 else 4,
        "stages": 3,
        "precision": precision,
    }
    return {**config, **split_product_parts(program, region, config)}


def _strided_columns(program: Program, region: Region) -> bool:
    """Whether the reduced axes step over memory while an independent axis is dense."""
    dense = _dense_axes(program, region)
    return (
        bool(region.kept)
        and bool(region.reduced)
        and not (dense & set(region.reduced))
        and bool(dense & set(region.kept))
    )


def _dense_axes(program: Program, region: Region) -> set[Axis]:
    """Innermost axes of the large tensors that the region reads."""
    found: set[Axis] = set()
    sizes = program.graph.sizes
    largest = 0
    for (name, index), prim in program.values.items():
        if prim not in region.inputs:
            continue
        kind = program.graph.type_of(Ref(name, index))
        numel = kind.numel.value(sizes)
        if numel < largest:
            continue
        if numel > largest:
            found, largest = set(), numel
        for dim, stride in enumerate(kind.stride):
            if stride.is_constant and stride.constant == 1:
                axes = region.table.axes(prim, dim)
                if axes:
                    found.add(axes[-1])
    return found


def variants(program: Program, region: Region, config: Mapping[str, int | str | bool]) -> list[Config]:
    """Other configurations worth measuring, the present one left out."""
    if region.kind is RegionKind.MATMUL:
        found = _product_variants(config)
    elif region.kind is RegionKind.ATTENTION:
        found = [
            {"block_m": m, "block_n": n, "warps": w, "stages": s}
            for m, n, w, s in [
                (128, 64, 4, 3),
                (128, 128, 8, 3),
                (64, 64, 4, 3),
                (128, 64, 8, 2),
                (128, 32, 4, 4),
                (64, 128, 4, 3),
            ]
        ]
    elif region.kind is RegionKind.MAP:
        found = [
            {
                "rows": max(1, total // min(total, int(config["block"]))),
                "block": min(total, int(config["block"]) if len(region.kept) > 1 else total),
                "warps": w,
            }
            for total, w in [(512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 4), (8192, 8)]
        ]
        if len(region.kept) > 1:
            found += [{"rows": 1, "block": b, "warps": w} for b, w in [(1024, 4), (2048, 4), (2048, 8), (4096, 8)]]
    else:
        found = _reduction_variants(program, region, config)
    merged = [{**config, **changes} for changes in found]
    unique: list[Config] = []
    for item in merged:
        if item != dict(config) and item not in unique:
            unique.append(item)
    return unique


def _reduction_variants(program: Program, region: Region, config: Mapping[str, int | str | bool]) -> list[Config]:
    columns = region.columns.value(program.graph.sizes)
    whole = next_power_of_two(columns)
    found: list[Config] = []
    if _strided_columns(program, region):
        return [
            {"rows": r, "block": b, "warps": w, "loop": True}
            for r, b, w in [
                (32, 32, 4),
                (64, 32, 4),
                (64, 32, 8),
                (128, 16, 4),
                (128, 16, 8),
                (32, 16, 2),
                (64, 64, 8),
                (128, 32, 8),
            ]
        ]
    if region.kind is RegionKind.SCAN:
        return [
            {"block": b, "rows": r, "warps": w}
            for b, r, w in [(1024, 1, 4), (2048, 1, 8), (4096, 1, 8), (512, 4, 4), (256, 4, 4)]
        ]
    if whole <= 65536:
        for rows in (1, 2, 4, 8, 16):
            if rows * whole > 32768 and rows > 1:
                continue
            found += [
                {"rows": rows, "block": whole, "loop": False, "warps": warps}
                for warps in (1, 2, 4, 8, 16, 32)
                if 8 <= rows * whole / (warps * 32) <= 64
            ]
    if columns > 1024:
        found += [
            {"rows": 1, "block": block, "loop": True, "warps": warps}
            for block, warps in [
                (1024, 4),
                (2048, 4),
                (2048, 8),
                (4096, 8),
                (4096, 16),
                (8192, 16),
                (8192, 8),
                (16384, 16),
            ]
            if block < whole
        ]
    return found


def _product_variants(config: Mapping[str, int | str | bool]) -> list[Config]:
    shapes = [
        (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 4),
        (128, 128, 128, 8, 2), (64, 256, 64, 8, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4),
        (128, 128, 32, 4, 4), (64, 64, 32, 4, 5),
    ]  # fmt: skip
    return [{"block_m": m, "block_n": n, "block_k": k, "warps": w, "stages": s} for m, n, k, w, s in shapes]
