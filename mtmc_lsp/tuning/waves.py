"""Wave quantisation of product tiles, and how stream-K balances the last wave (Osama et al., arXiv 2301.03598).

A multiprocessor needs as long for two concurrent tiles as for two tiles in sequence, so tiles run in waves of one per
multiprocessor. In the last wave some multiprocessors are idle. Library products have waves too, with unknown tile sizes. So idle
time counts only where configurations of one product are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import ITEMSIZE, compute_dtype
from mtmc_lsp.ir.primitives import KernelIR, ProductSizes
from mtmc_lsp.ir.regions import Region, product_in, products_in
from mtmc_lsp.schedule.configs import MatmulConfig

MOST_WAVES = 5
"""Full waves up to which stream-K is tried: with more, the idle share is small."""
LEAST_RUN = 4
"""Blocks of K per program from which on stream-K pays for its start and its partial sums."""


@dataclass(frozen=True)
class Waves:
    """A product's work: equal tiles, each a loop over equal blocks of K."""

    tiles: int
    steps: int
    """Blocks of K of each tile."""
    elements: int
    """Of a tile."""

    @staticmethod
    def of(ir: KernelIR, region: Region, config: MatmulConfig) -> Waves:
        """The waves of a region with a product, for a configuration."""
        prim, sizes = product_in(ir, region), ir.graph.sizes
        sized = ProductSizes.of(ir.prims, prim)
        m, n, k, channels = (size.value(sizes) for size in (sized.m, sized.n, sized.k, sized.channels))
        n = n if region.halves is None else n // 2
        tiles = sized.batch.value(sizes) * -(-m // config.block_m) * -(-n // config.block_n)
        deep = config.block_k
        steps = k // channels * -(-channels // deep) if config.kernel_positions else -(-k // deep)
        return Waves(tiles, steps, config.elements)

    def shared(self, programs: int) -> int:
        """Tiles that ``programs`` programs share: those of the last wave, full or not."""
        return (self.tiles - 1) % programs + 1

    def run(self, programs: int) -> int:
        """Most K blocks of shared tiles that one program computes."""
        return -(-self.shared(programs) * self.steps // programs)

    def parts(self, programs: int) -> int:
        """About how many partial tiles the programs write: one each, and one more for each further tile that a run covers."""
        shared, run = self.shared(programs), self.run(programs)
        return -(-shared * self.steps // run) + (shared - 1 if self.steps % run else 0)

    def busy(self, config: MatmulConfig, device: DeviceModel) -> float:
        """Average share of the device that is busy until the last program ends."""
        at_once = device.sm_count
        programs = config.stream_k
        if programs:
            each = (self.tiles - self.shared(programs)) // programs * self.steps + self.run(programs)
            return self.tiles * self.steps / (at_once * -(-programs // at_once) * each)
        pieces = self.tiles * config.split_k
        return pieces / (at_once * -(-pieces // at_once))


def parts_bytes(ir: KernelIR, region: Region, config: MatmulConfig) -> float:
    """Bytes of the partial sums of stream-K, written once and read once; 0 for other products."""
    programs = config.stream_k
    if not programs:
        return 0.0
    waves = Waves.of(ir, region, config)
    itemsize = ITEMSIZE[compute_dtype(product_in(ir, region).dtype)]
    return 2.0 * waves.parts(programs) * waves.elements * itemsize


def stream_programs(ir: KernelIR, region: Region, config: MatmulConfig, device: DeviceModel) -> list[int]:
    """Numbers of programs worth trying for stream-K; none where tiles are many or K is short."""
    if config.is_split or config.splits_one_operand_on_load or len(products_in(ir, region)) > 1:
        return []
    waves = Waves.of(ir, region, config)
    if waves.tiles >= MOST_WAVES * device.sm_count:
        return []
    # With small tiles two programs fit on a multiprocessor: one loads while the other multiplies.
    numbers = (device.sm_count, 2 * device.sm_count)
    return [number for number in numbers if waves.run(number) >= LEAST_RUN]
