"""Looks at a candidate's results again around its timing: the same before and after, right for new contents too.

Runs in workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mtmc_lsp.core.dtypes import EPSILON, TOLERANCE
from mtmc_lsp.core.errors import MeasurementRejected
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.timing.worker.clock import Run
from mtmc_lsp.verify.worker.comparison.batched_reads import computable, numbers
from mtmc_lsp.verify.worker.comparison.compare import FACTORS
from mtmc_lsp.verify.worker.comparison.distances import Distances, finite, pieces
from mtmc_lsp.verify.worker.run_target import flatten

CHANGE = 0.75
"""New contents are the old ones times this: in range for whatever the target expects."""
TF32_TOLERANCE = 1e-3
"""Of products with operands of ten bits: cuDNN's own error on an H200 is 3e-4 to 4e-4."""
TF32_EPSILON = 2.0**-10
"""The spacing of TF32's numbers at 1."""
MOST_APART = 0.5
"""Relative L2 distance of results that rounding may excuse; zeros are at 1."""
MOST_OTHER_INDICES = 1e-3
"""The part of an integer result that may differ from eager's: indices of values that tie."""


def rounded_within(graph: Graph) -> float:
    """The tolerance of the coarsest float that a value of the graph is rounded to, of TF32 operands too.

    A float32 result of values that were rounded to bfloat16 before is no more exact than these.
    """
    coarsest = max((TOLERANCE[dtype] for dtype in _dtypes(graph) if dtype in TOLERANCE), default=0.0)
    return max(coarsest, TF32_TOLERANCE if graph.runs_tf32 else 0.0)


def coarsest_epsilon(graph: Graph) -> float:
    """The spacing at 1 of the coarsest float that a value of the graph is rounded to, of TF32 operands too."""
    coarsest = max((EPSILON[dtype] for dtype in _dtypes(graph) if dtype in EPSILON), default=0.0)
    return max(coarsest, TF32_EPSILON if graph.runs_tf32 else 0.0)


def _dtypes(graph: Graph) -> set[str]:
    kinds = [item.type for item in graph.inputs] + [kind for node in graph.nodes for kind in node.outputs]
    return {kind.dtype for kind in kinds}


class Retest:
    """The checks around one timing. What was verified before is taken as right; this sees that it stays so."""

    def __init__(
        self,
        candidate: Run,
        eager: Run,
        inputs: Mapping[str, torch.Tensor],
        *,
        moved: Callable[[], Sequence[tuple[str, torch.Tensor]]] = tuple,
        random: bool,
        tolerance: float = 0.0,
        epsilon: float = EPSILON["float32"],
    ) -> None:
        """Remember the inputs.

        Args:
            candidate: as it is timed.
            eager: the user's own code on the same inputs.
            inputs: the tensors that both read, changed in place here and put back.
            moved: gives those of them that a call has moved to memory of its own, which must follow.
            random: whether results are random, and therefore only their form is compared.
            tolerance: least relative L2 distance of two results that is no fault, beside that of their dtype.
            epsilon: how coarsely values are rounded on the way, as a part of them. Where eager's own results move farther with
                such a rounding of the inputs, as those of deep networks that normalise by batches do, it is no fault either.
        """
        self._candidate, self._eager, self._inputs = candidate, eager, inputs
        self._moved, self._random, self._tolerance, self._epsilon = moved, random, tolerance, epsilon
        self._saved = {name: tensor.detach().clone() for name, tensor in inputs.items()}
        self._first: list[Any] = []
        self._last: Any = None
        self._written: list[str] = []
        """The inputs that a call writes into: what they hold then are results too."""

    def kept(self) -> Any:
        """The candidate, whose result is looked at after the last timed call."""
        self._last = self._candidate()
        return self._last

    def before(self) -> None:
        """See that the candidate gives what eager gives.

        Raises:
            MeasurementRejected: it does not.
        """
        mine = self._fresh(self._candidate)
        changed = {n: t.clone() for n, t in self._inputs.items() if not torch.equal(t, self._saved[n])}
        own = self._fresh(self._eager)
        self._written = [n for n, t in self._inputs.items() if n in changed or not torch.equal(t, self._saved[n])]
        self._first = [*mine, *(changed.get(name, self._saved[name]) for name in self._written)]
        own += [self._inputs[name].clone() for name in self._written]
        self._compare(self._first, own, "before timing", self._saved)

    def after(self) -> None:
        """See that the last timed call gave it too, and that new contents of the same tensors are not ignored.

        Raises:
            MeasurementRejected: one of these does not hold.
        """
        unchanged = all(torch.equal(tensor, self._saved[name]) for name, tensor in self._inputs.items())
        if unchanged and not self._written:
            self._compare(flatten(self._last), self._first, "while timed", self._saved)
        self._last = None
        changed = {n: t * CHANGE if t.is_floating_point() else t for n, t in self._saved.items()}
        mine = self._fresh(self._candidate, changed)
        self._compare(mine, self._fresh(self._eager, changed), "on new contents of the same tensors", changed)
        self.restore()

    def restore(self) -> None:
        """Put the inputs back."""
        self._fill(self._saved)

    def _fresh(self, run: Run, contents: Mapping[str, torch.Tensor] | None = None) -> list[Any]:
        self._fill(contents or self._saved)
        results = flatten(run())
        written = [self._inputs[name] for name in self._written]
        return [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in (*results, *written)]

    def _fill(self, contents: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in (*self._inputs.items(), *self._moved()):
            # Expanded tensors cannot be written as they are; nothing could have changed them either.
            if 0 not in tensor.stride() and not torch.equal(tensor, contents[name]):
                tensor.copy_(contents[name])

    def _compare(self, mine: list[Any], own: list[Any], when: str, contents: Mapping[str, torch.Tensor]) -> None:
        if len(mine) != len(own):
            raise MeasurementRejected(f"another number of results {when}")
        rounded: list[Any] = []
        for i, (a, b) in enumerate(zip(mine, own, strict=True)):
            if not isinstance(b, torch.Tensor) or (isinstance(a, torch.Tensor) and self._agrees(a, b)):
                continue
            rounded = rounded or self._rounded(contents)
            if not isinstance(a, torch.Tensor) or not self._agrees(a, b, self._moved_by(rounded[i], b)):
                raise MeasurementRejected(
                    f"result {i} differs {when}: the candidate does not do the same work each time"
                )

    def _moved_by(self, rounded: Any, own: torch.Tensor) -> float:
        """How far apart results may be where rounding alone moves the user's own so far; never as far as zeros are from them."""
        distance = _apart(rounded, own)
        return min(FACTORS["budget"] * distance, MOST_APART) if math.isfinite(distance) else 0.0

    def _rounded(self, contents: Mapping[str, torch.Tensor]) -> list[Any]:
        """What eager gives on inputs whose elements are moved by up to half of epsilon, as a part of them."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            factor = 1.0 + self._epsilon * (torch.rand_like(tensor, dtype=torch.float32) - 0.5)
            value = computable(tensor)
            return (value * factor.to(value.dtype)).to(tensor.dtype)

        return self._fresh(self._eager, {name: moved(tensor) for name, tensor in contents.items()})

    def _agrees(self, a: torch.Tensor, b: torch.Tensor, tolerance: float = 0.0) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if self._random or not a.numel():
            return True
        if not a.is_floating_point():
            return float((a != b).float().mean()) <= MOST_OTHER_INDICES
        # Two results, each within the tolerance of the oracle.
        allowed = 2 * max(TOLERANCE[str(b.dtype).removeprefix("torch.")], self._tolerance)
        return _apart(a, b) <= max(allowed, tolerance)


def _apart(result: torch.Tensor, own: torch.Tensor) -> float:
    """The relative L2 distance of a result from another, infinite where it is not finite and that one is."""
    distances, broken = Distances(own.device), torch.zeros((), dtype=torch.float64, device=own.device)
    for mine, theirs in pieces(result, own):
        told = finite(theirs)
        broken += (told & ~finite(mine)).any()
        distances.add(theirs, told, mine)
    lost, distance = numbers([broken, distances.relative()[0]])
    return float("inf") if lost else distance
