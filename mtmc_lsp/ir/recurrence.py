"""Recurrent layers as kernels of ours: which of their steps may run at once.

Layer ``l`` at step ``t`` needs its own state after step ``t - 1`` and, above the first layer, what the layer below gave at
step ``t``. All ``(l, t)`` with ``l + t = k`` therefore need only what those of ``k - 1`` gave, and none of them needs another:
they are one launch (a wavefront; Appleyard et al., arXiv 1604.01946), and ``T + L - 1`` launches take the place of ``T * L``
steps. A state has two places, of which step ``t`` reads one and writes the other, so that within a launch nothing is read that
another program writes: layer ``l`` writes place ``(t + 1) % 2``; itself it reads ``t % 2``, and layer ``l + 1``, which is one
step behind, ``(t - 1 + 1) % 2`` of it, the same. Launches on one stream run in order, so every read finds a finished value.

Both directions of a layer are independent of each other, but the layer above needs both to be complete: there a launch is one
step of one layer, forwards and backwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.core.graph import RECURRENT_GATES, Graph, Node
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region

LIBRARY_STEP_US = 10.0
"""About what cuDNN took for a step of one layer and direction of 256 units and a batch of 10 on an H200: 10 to 16."""


@dataclass(frozen=True)
class Recurrence:
    """A recurrent layer, or several one upon another."""

    cell: str
    """``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    layers: int
    directions: int
    hidden: int
    """Units of a layer, per direction."""
    has_biases: bool
    batch_first: bool

    @property
    def gates(self) -> int:
        """Products of the input per unit and step."""
        return RECURRENT_GATES[self.cell]

    @property
    def states(self) -> int:
        """Tensors that go from step to step: the hidden state, and an LSTM's cell."""
        return 2 if self.cell == "lstm" else 1

    @property
    def lines(self) -> int:
        """Layers (or directions of a layer) that run side by side in one launch."""
        return self.layers if self.directions == 1 else self.directions

    def launches(self, steps: int) -> int:
        """Launches for a sequence of ``steps``."""
        return steps + self.layers - 1 if self.directions == 1 else steps * self.layers

    def weights(self, prim: Prim, number: int) -> tuple[str, ...]:
        """The primitives of one layer and direction: input and hidden weights, then the biases where there are some."""
        each = 4 if self.has_biases else 2
        first = 1 + self.states + number * each
        return prim.inputs[first : first + each]


def recurrence_of(prim: Prim) -> Recurrence:
    """The layers that a primitive is a result of."""
    form = prim.attrs["form"]
    assert isinstance(form, Recurrence)
    return form


def recurrence_in(ir: KernelIR, region: Region) -> Prim:
    """A primitive of a region of recurrent layers."""
    return next(prim for name in region.prims if (prim := ir.prims[name]).op is PrimOp.RECURRENT)


def steps_and_batch(ir: KernelIR, prim: Prim) -> tuple[Size, Size]:
    """The length of the sequence and of the batch."""
    first, second = ir.prims[prim.inputs[0]].shape[:2]
    return (second, first) if recurrence_of(prim).batch_first else (first, second)


def library_us(node: Node, graph: Graph) -> float:
    """Estimated microseconds of a layer in PyTorch: the library's steps wait for one another."""
    steps = node.type.shape[1 if node.args[-1] is True else 0].value(graph.sizes)
    lines = node.outputs[1].shape[0].value(graph.sizes)
    return steps * lines * LIBRARY_STEP_US


def weight_bytes(ir: KernelIR, prim: Prim) -> float:
    """Bytes that a launch with all layers reads: every weight but the first layer's input weights."""
    form = recurrence_of(prim)
    per_layer = 2 * form.lines - 1 if form.directions == 1 else form.directions
    return float(per_layer * form.gates * form.hidden**2 * ITEMSIZE[prim.dtype])
