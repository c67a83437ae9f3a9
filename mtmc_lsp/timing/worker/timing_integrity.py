"""Verifies a candidate's results before and after its timing, also for new input values. Runs in workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mtmc_lsp.capture.worker.arguments.strided_tensors import shares_elements
from mtmc_lsp.core.dtypes import EPSILON, TOLERANCE
from mtmc_lsp.core.errors import CandidateRaised, ResultsDiffer
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.process.worker.failures import classify
from mtmc_lsp.timing.worker.clock import Run
from mtmc_lsp.timing.worker.slow_original import Original
from mtmc_lsp.verify.error_limits import FACTORS
from mtmc_lsp.verify.worker.comparison.batched_reads import computable, numbers
from mtmc_lsp.verify.worker.comparison.distances import Distances, finite, pieces
from mtmc_lsp.verify.worker.run_target import flatten

NEW_VALUES_FACTOR = 0.75
"""Factor for new input values, which stay in the range that the target expects."""
TF32_TOLERANCE = 1e-3
"""Tolerance of products with TF32 operands: cuDNN's error on an H200 is 3e-4 to 4e-4."""
TF32_EPSILON = 2.0**-10
"""Machine epsilon of TF32."""
MAX_ROUNDING_DISTANCE = 0.5
"""Largest relative L2 distance that rounding may explain; all zeros have distance 1."""
FIRST, CHANGED = "the inputs", "new values"
"""Names of the contents on which results are compared."""
PERTURBATIONS = 4
"""Number of perturbed inputs; the errors of one draw may cancel by chance, as its results may."""
MAX_INDEX_MISMATCH = 1e-3
"""Fraction of an integer result that may differ from eager mode, such as indices of equal values."""

MAX_ERROR_CHARACTERS = 300
"""Maximum length of the text of an exception in a report."""


def error_text(error: BaseException) -> str:
    """The type and the beginning of the text of an exception, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_ERROR_CHARACTERS]}"


def rounded_within(graph: Graph) -> float:
    """The largest tolerance of the float dtypes in the graph, including TF32 operands.

    A float32 result computed from bfloat16 values is only as accurate as these.
    """
    coarsest = max((TOLERANCE[dtype] for dtype in _dtypes(graph) if dtype in TOLERANCE), default=0.0)
    return max(coarsest, TF32_TOLERANCE if graph.runs_tf32 else 0.0)


def coarsest_epsilon(graph: Graph) -> float:
    """The largest machine epsilon of the float dtypes in the graph, including TF32 operands."""
    coarsest = max((EPSILON[dtype] for dtype in _dtypes(graph) if dtype in EPSILON), default=0.0)
    return max(coarsest, TF32_EPSILON if graph.runs_tf32 else 0.0)


def _dtypes(graph: Graph) -> set[str]:
    kinds = [item.type for item in graph.inputs] + [kind for node in graph.nodes for kind in node.outputs]
    return {kind.dtype for kind in kinds}


class Retest:
    """Checks around one timing. The candidate was verified before; they detect results that change during timing."""

    def __init__(
        self,
        candidate: Run,
        eager: Run,
        inputs: Mapping[str, torch.Tensor],
        *,
        original: Original | None = None,
        relocated: Callable[[], Sequence[tuple[str, torch.Tensor]]] = tuple,
        random: bool,
        tolerance: float = 0.0,
        epsilon: float = EPSILON["float32"],
    ) -> None:
        """Save the inputs.

        Args:
            eager: the user's code on the same inputs.
            inputs: the tensors that both read; they are changed in place here and restored.
            original: results of ``eager`` in earlier timings, which are not computed again.
            moved: returns the inputs that a call moved to other memory, which must be updated too.
            random: whether results are random, so that only shapes and dtypes are compared.
            tolerance: allowed relative L2 distance of two results, if larger than that of their dtype.
            epsilon: relative rounding of intermediate values. If rounding the inputs by it changes the eager results more than
                the tolerance, as in deep networks with batch norm, that change is allowed too.
        """
        self._candidate, self._eager, self._inputs = candidate, eager, inputs
        self._original = original or Original()
        self._relocated, self._random, self._tolerance, self._epsilon = relocated, random, tolerance, epsilon
        self._saved = {name: tensor.detach().clone() for name, tensor in inputs.items()}
        self._first: list[Any] = []
        self._last: Any = None
        self._written: list[str] = []
        """The inputs that a call changes; their new values are results too."""

    def call(self) -> Any:
        """Call the candidate and keep its result for the check after the last timed call."""
        self._last = self._candidate()
        return self._last

    def before(self) -> None:
        """Check that the candidate's results equal those of eager mode.

        Raises:
            CandidateRaised: the candidate raises an exception.
            ResultsDiffer: the results differ.
        """
        try:
            candidate_results = self._fresh(self._candidate)
        except Exception as error:  # generated code may raise anything
            if classify(error).is_out_of_memory:
                raise
            raise CandidateRaised(f"a call of this version raises {error_text(error)}") from error
        changed = {n: t.clone() for n, t in self._inputs.items() if not torch.equal(t, self._saved[n])}
        eager_results = self._eager_results(FIRST, self._saved)
        self._written = [n for n, t in self._inputs.items() if n in changed or not torch.equal(t, self._saved[n])]
        self._first = [*candidate_results, *(changed.get(name, self._saved[name]) for name in self._written)]
        eager_results += [self._inputs[name].clone() for name in self._written]
        self._compare(self._first, eager_results, "before timing", self._saved)

    def after(self) -> None:
        """Check the last timed call, and a call on new values in the same tensors, which a cached result would fail.

        Raises:
            ResultsDiffer: a result differs.
        """
        unchanged = all(torch.equal(tensor, self._saved[name]) for name, tensor in self._inputs.items())
        if unchanged and not self._written:
            self._compare(flatten(self._last), self._first, "while timed", self._saved)
        self._last = None
        changed = {n: t * NEW_VALUES_FACTOR if t.is_floating_point() else t for n, t in self._saved.items()}
        results = self._fresh(self._candidate, changed)
        self._compare(results, self._eager_results(CHANGED, changed), "on new contents of the same tensors", changed)
        self.restore()

    @property
    def knows_original(self) -> bool:
        """Whether later timings need no call of the user's code for its results."""
        return self._original.results(FIRST, self._saved) is not None

    def _eager_results(self, name: str, contents: Mapping[str, torch.Tensor]) -> list[Any]:
        """The results of the user's code on these contents; those of an earlier timing if they are kept."""
        known = self._original.results(name, self._saved)
        if known is not None:
            self._fill(contents)
            return [*known, *(contents[written].clone() for written in self._written)]
        began = time.perf_counter()
        results = self._fresh(self._eager, contents)
        seconds = time.perf_counter() - began
        if not (self._random or self._written) and all(torch.equal(t, contents[n]) for n, t in self._inputs.items()):
            self._original.keep(name, self._saved, results, seconds)
        return results

    def restore(self) -> None:
        """Restore the inputs."""
        self._fill(self._saved)

    def _fresh(self, run: Run, contents: Mapping[str, torch.Tensor] | None = None) -> list[Any]:
        self._fill(contents or self._saved)
        results = flatten(run())
        written = [self._inputs[name] for name in self._written]
        return [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in (*results, *written)]

    def _fill(self, contents: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in (*self._inputs.items(), *self._relocated()):
            # Expanded and overlapping tensors cannot be written, so nothing can have changed them.
            if not shares_elements(tensor.shape, tensor.stride()) and not torch.equal(tensor, contents[name]):
                tensor.copy_(contents[name])

    def _compare(
        self, results: list[Any], reference: list[Any], when: str, contents: Mapping[str, torch.Tensor]
    ) -> None:
        if len(results) != len(reference):
            raise ResultsDiffer(f"another number of results {when}")
        perturbed: list[list[Any]] = []
        for i, (a, b) in enumerate(zip(results, reference, strict=True)):
            if not isinstance(b, torch.Tensor) or (isinstance(a, torch.Tensor) and self._agrees(a, b)):
                continue
            perturbed = perturbed or self._perturbed_results(contents)
            rounding = max(self._rounding_distance(outcome[i], b) for outcome in perturbed)
            if not isinstance(a, torch.Tensor) or not self._agrees(a, b, rounding):
                raise ResultsDiffer(f"result {i} differs {when}: the candidate does not do the same work each time")

    def _rounding_distance(self, rounded: Any, reference: torch.Tensor) -> float:
        """The distance that rounding of the inputs explains, from its effect on the eager result; less than that of zeros."""
        distance = _relative_distance(rounded, reference)
        return min(FACTORS["budget"] * distance, MAX_ROUNDING_DISTANCE) if math.isfinite(distance) else 0.0

    def _perturbed_results(self, contents: Mapping[str, torch.Tensor]) -> list[list[Any]]:
        """The eager results on inputs whose elements are perturbed by a relative error of up to epsilon / 2.

        The perturbations have a generator with a fixed seed: the user's random state stays as it is, and a verdict is repeatable.
        """
        generators: dict[torch.device, torch.Generator] = {}

        def perturbed(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            if tensor.device not in generators:
                generators[tensor.device] = torch.Generator(tensor.device).manual_seed(0)
            uniform = torch.rand(tensor.shape, generator=generators[tensor.device], device=tensor.device)
            value = computable(tensor)
            return (value * (1.0 + self._epsilon * (uniform - 0.5)).to(value.dtype)).to(tensor.dtype)

        return [
            self._fresh(self._eager, {name: perturbed(tensor) for name, tensor in contents.items()})
            for _ in range(PERTURBATIONS)
        ]

    def _agrees(self, a: torch.Tensor, b: torch.Tensor, tolerance: float = 0.0) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if self._random or not a.numel():
            return True
        if not a.is_floating_point():
            return float((a != b).float().mean()) <= MAX_INDEX_MISMATCH
        # Both results may differ from the oracle by the tolerance.
        allowed = 2 * max(TOLERANCE[str(b.dtype).removeprefix("torch.")], self._tolerance)
        return _relative_distance(a, b) <= max(allowed, tolerance)


def _relative_distance(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The relative L2 distance of a result from a reference; infinite if it is not finite where the reference is."""
    distances, broken = Distances(reference.device), torch.zeros((), dtype=torch.float64, device=reference.device)
    for result_piece, reference_piece in pieces(result, reference):
        is_finite = finite(reference_piece)
        broken += (is_finite & ~finite(result_piece)).any()
        distances.add(reference_piece, is_finite, result_piece)
    is_broken, distance = numbers([broken, distances.relative()[0]])
    return float("inf") if is_broken else distance
