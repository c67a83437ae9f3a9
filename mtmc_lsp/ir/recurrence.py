"""Recurrent layers as generated kernels: which of their steps may run at once.

Layer ``l`` at step ``t`` needs its state after step ``t - 1`` and, above the first layer, the output of the layer below at
step ``t``. All ``(l, t)`` with ``l + t = k`` therefore depend only on those of ``k - 1`` and not on each other, so they form
one launch (a wavefront; Appleyard et al., arXiv 1604.01946): ``T + L - 1`` launches replace ``T * L`` steps. Each state is
double-buffered: step ``t`` reads one buffer and writes the other, so no program instance reads data that another one writes
in the same launch. Layer ``l`` writes buffer ``(t + 1) % 2`` and reads its state from ``t % 2``. Layer ``l + 1`` is one step
behind and reads buffer ``(t - 1 + 1) % 2`` of layer ``l``, which is the same. Launches on one stream run in order, so every
read sees a complete value.

The two directions of a layer are independent, but the layer above needs both to be complete: for bidirectional layers a launch
is one step of one layer, forwards and backwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.core.graph import RECURRENT_GATES, Graph, Node
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region

LAUNCHES_PER_STEP = 2.5
"""Time of one step of one layer and direction in the library, in kernel launches. Measured with cuDNN on an H200, where a launch
takes 4 us: 10 to 16 us with 256 units and batch 10."""


@dataclass(frozen=True)
class Recurrence:
    """A stack of one or more recurrent layers."""

    cell: str
    """``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    layers: int
    directions: int
    hidden: int
    """Hidden units per layer and direction."""
    has_biases: bool
    batch_first: bool

    @property
    def gates(self) -> int:
        """Number of gates per unit: matrix products of the input per unit and step."""
        return RECURRENT_GATES[self.cell]

    @property
    def states(self) -> int:
        """State tensors carried between steps: the hidden state and, for an LSTM, the cell state."""
        return 2 if self.cell == "lstm" else 1

    @property
    def parallel_layers(self) -> int:
        """Layers (or directions of one layer) that run in parallel in one launch."""
        return self.layers if self.directions == 1 else self.directions

    def launches(self, steps: int) -> int:
        """Number of launches for a sequence of ``steps``."""
        return steps + self.layers - 1 if self.directions == 1 else steps * self.layers

    def weights(self, prim: Prim, number: int) -> tuple[str, ...]:
        """The weight primitives of one layer and direction: input weights, hidden weights, then the biases if present."""
        each = 4 if self.has_biases else 2
        first = 1 + self.states + number * each
        return prim.inputs[first : first + each]


def recurrence_of(prim: Prim) -> Recurrence:
    """The recurrent layers of a ``RECURRENT`` primitive."""
    form = prim.attrs["form"]
    assert isinstance(form, Recurrence)
    return form


def recurrence_in(ir: KernelIR, region: Region) -> Prim:
    """A ``RECURRENT`` primitive of a region."""
    return next(prim for name in region.prims if (prim := ir.prims[name]).op is PrimOp.RECURRENT)


def steps_and_batch(ir: KernelIR, prim: Prim) -> tuple[Size, Size]:
    """Sequence length and batch size."""
    first, second = ir.prims[prim.inputs[0]].shape[:2]
    return (second, first) if recurrence_of(prim).batch_first else (first, second)


def library_us(node: Node, graph: Graph, device: DeviceModel) -> float:
    """Estimated microseconds of a layer in PyTorch, whose library runs the steps one after another.

    Launches take longer than reading the weights, which a cache holds from step to step.
    """
    steps = node.type.shape[1 if node.args[-1] is True else 0].value(graph.sizes)
    state_count = node.outputs[1].shape[0].value(graph.sizes)
    return steps * state_count * (LAUNCHES_PER_STEP * device.launch_us)


def weight_bytes(ir: KernelIR, prim: Prim) -> float:
    """Bytes of weights that a launch with all layers reads: all weights except the first layer's input weights."""
    form = recurrence_of(prim)
    per_layer = 2 * form.parallel_layers - 1 if form.directions == 1 else form.directions
    return float(per_layer * form.gates * form.hidden**2 * ITEMSIZE[prim.dtype])
