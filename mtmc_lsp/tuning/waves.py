"""How evenly a product's tiles fill a device, and how stream-K deals out those that would not.

A multiprocessor takes as long for two tiles at once as for one after the other, so tiles come in waves, one to each; in the last
wave some have none. The library's products have such waves too, in tiles of sizes that it does not tell. So what idles in them is
only counted where configurations of one product are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import ITEMSIZE, compute_dtype
from mtmc_lsp.ir.primitives import KernelIR, ProductSizes
from mtmc_lsp.ir.regions import Region, product_in
from mtmc_lsp.schedule.configs import MatmulConfig

MOST_WAVES = 5
"""Full waves up to which it is worth trying: of more, what idles in the last one is little."""
LEAST_RUN = 4
"""Blocks of K from which on a program's run of them is worth its start and the parts that it writes."""


@dataclass(frozen=True)
class Waves:
    """A product's work: equal tiles, each a walk over equal blocks of K."""

    tiles: int
    steps: int
    """Blocks of K of each tile."""
    elements: int
    """Of a tile."""

    @staticmethod
    def of(ir: KernelIR, region: Region, config: MatmulConfig) -> Waves:
        """That of a region with a product, in the tiles of a configuration."""
        prim, sizes = product_in(ir, region), ir.graph.sizes
        own = ProductSizes.of(ir.prims, prim)
        m, n, k, channels = (size.value(sizes) for size in (own.m, own.n, own.k, own.channels))
        tiles = own.batch.value(sizes) * -(-m // config.block_m) * -(-n // config.block_n)
        deep = config.block_k
        steps = k // channels * -(-channels // deep) if config.kernel_positions else -(-k // deep)
        return Waves(tiles, steps, config.elements)

    def shared(self, programs: int) -> int:
        """Tiles that so many programs share: those of the last wave, be it full or not."""
        return (self.tiles - 1) % programs + 1

    def run(self, programs: int) -> int:
        """Most blocks of K that a program has of the shared tiles."""
        return -(-self.shared(programs) * self.steps // programs)

    def parts(self, programs: int) -> int:
        """About how many parts of shared tiles programs write: one each, and one more for each tile that a run goes on to."""
        shared, run = self.shared(programs), self.run(programs)
        return -(-shared * self.steps // run) + (shared - 1 if self.steps % run else 0)

    def busy(self, config: MatmulConfig, device: DeviceModel) -> float:
        """Share of the device that works, on average, until the last program is done."""
        at_once = device.sm_count
        programs = config.stream_k
        if programs:
            each = (self.tiles - self.shared(programs)) // programs * self.steps + self.run(programs)
            return self.tiles * self.steps / (at_once * -(-programs // at_once) * each)
        pieces = self.tiles * config.split_k
        return pieces / (at_once * -(-pieces // at_once))


def parts_bytes(ir: KernelIR, region: Region, config: MatmulConfig) -> float:
    """Bytes of the parts of a product by stream-K, written once and read once; 0 for any other."""
    programs = config.stream_k
    if not programs:
        return 0.0
    waves = Waves.of(ir, region, config)
    itemsize = ITEMSIZE[compute_dtype(product_in(ir, region).dtype)]
    return 2.0 * waves.parts(programs) * waves.elements * itemsize


def stream_programs(ir: KernelIR, region: Region, config: MatmulConfig, device: DeviceModel) -> list[int]:
    """Numbers of programs among which stream-K may be worth trying; none where tiles are many or K is short."""
    if config.is_split or config.splits_one_operand_on_load:
        return []
    waves = Waves.of(ir, region, config)
    if waves.tiles >= MOST_WAVES * device.sm_count:
        return []
    # Of small tiles a multiprocessor holds two programs, one of which loads while the other multiplies.
    numbers = (device.sm_count, 2 * device.sm_count)
    return [number for number in numbers if waves.run(number) >= LEAST_RUN]
