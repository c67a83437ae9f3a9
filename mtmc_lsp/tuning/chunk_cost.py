"""Cost of loops over time steps whose iterations are computed in chunks, by products of matrices."""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.ir.loops.chunks import GateKind, chunk_form
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.loop_configs import key_block, programs_of_chunks
from mtmc_lsp.tuning.cost import TRITON_EFFICIENCY, Cost, roofline_us

LOAD_US, PRODUCT_US, SUBSTITUTION_US = 0.6, 0.3, 0.15
"""Microseconds until a load from memory arrives, until a small product is complete, and for an iteration of a triangular system.
Estimates, not measured."""
PROGRAMS_PER_SM = 2
"""Programs whose chunks overlap on a multiprocessor. An estimate, not measured."""
PRODUCT_EFFICIENCY = {"fp32": 0.01, "tf32": 0.2}
"""Share of the device's rate that small products reach, by the format of their operands. The first was measured on an H200
(linear attention, chunks of 32): without tensor cores, the products do not fit into registers. The second is an estimate."""
DECAY_OPERATIONS = 80
"""Operations in float64 for the logarithm of a gate and the sums of logarithms. An estimate, not measured."""


def chunk_cost(form: LoopForm, moved: float, config: LoopConfig, device: DeviceModel) -> Cost:
    """The cost of a loop in chunks: its traffic, or the latency of the chunks and the arithmetic of their products."""
    chunk, length, keys = chunk_form(form), config.chunk, key_block(form)
    chunks = -(-form.loop.count.value(form.ir.graph.sizes) // length)
    programs = programs_of_chunks(form, chunk, config.block)
    waves = max(1.0, programs / (PROGRAMS_PER_SM * device.sm_count))
    busy = min(1.0, programs / device.sm_count)
    reads, states = len(chunk.reads), len(chunk.memories)
    multiplied = reads * length * (length * keys + length * config.block + keys * config.block)
    multiplied += states * length * keys * config.block
    products = 3 * reads + states
    rate = "tf32" if form.ir.graph.fp32_matmul == "tf32" else "fp32"
    flops = 2.0 * multiplied * programs * chunks
    decays = {item.gate: item.gate_kind for item in chunk.memories if item.gate_kind is not GateKind.NONE}
    gates = sum(length * (keys if kind is GateKind.KEY else 1) * DECAY_OPERATIONS for kind in decays.values())
    gates += sum(length * length for kind in decays.values() if kind is GateKind.SCALAR)
    seconds = flops / (PRODUCT_EFFICIENCY[rate] * device.flops[rate])
    seconds += gates * programs * chunks / device.fp64_flops
    per_chunk = LOAD_US / config.stages + PRODUCT_US * products
    per_chunk += SUBSTITUTION_US * length * sum(item.correction is not None for item in chunk.memories)
    memory = roofline_us(moved, 0.0, device, 1.0, TRITON_EFFICIENCY * busy)
    # The second launch checks for rows that need the loop itself.
    us = max(memory, chunks * per_chunk * waves + 1e6 * seconds / busy) + 2 * device.launch_us
    return Cost(moved, flops, us)
