"""Whether the reference runs products in TF32, and runs that do so, too. Runs in workers.

Libraries choose the precision for each size and call. If they use full precision on a small size, a candidate need not. On the
workload itself the reference's error counts. The precision of gradients and for other layouts is chosen independently, even of
two calls of the same code: a transposed 3D convolution of strided images ran in either.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.verify.cases import AUTOGRAD
from mtmc_lsp.verify.error_limits import FACTORS
from mtmc_lsp.verify.worker.comparison.compare import agreement
from mtmc_lsp.verify.worker.oracle import Tf32Products
from mtmc_lsp.verify.worker.oracle_runs.runs import CaseRuns, OracleRuns

TF32_ERROR = 2.0**-11
"""Relative error of one rounding to TF32's ten bits."""
TF32_SHARE = 0.25
"""A reference error of at least this part of the TF32 error means that TF32 was used; float32's is about a thousandth."""

_state: dict[str, bool] = {}
"""Under ``observed``: whether the reference's products ran in TF32 on the workload; empty until it has run."""


def uses_tf32(runs: CaseRuns, *, is_first: bool) -> bool:
    """Whether the limits of a case permit the error of TF32 products."""
    graph = runs.capture.graph
    has_gradients = runs.case.kind == AUTOGRAD or graph.backward is not None
    may_run_tf32 = graph.allows_tf32 and (has_gradients or bool(runs.case.layout))
    observed = _state.get("observed", False)
    return runs_products_in_tf32(graph, runs.device) or ((may_run_tf32 or observed) and not is_first)


def rounding_mode(runs: CaseRuns) -> Tf32Products:
    """The mode of perturbed runs whose limits permit the error of TF32 products."""
    graph = runs.capture.graph
    if runs_products_in_tf32(graph, runs.device):
        return Tf32Products(convolutions=False, products=True)
    return tf32_products(graph)


def observe(oracle: OracleRuns) -> dict[int | str, float]:
    """Compare the reference's errors on the workload with those of TF32 products, and keep for later cases what they show.

    Returns:
        By result, the distance between TF32 products and the oracle.
    """
    runs, graph = oracle.runs, oracle.runs.capture.graph
    # The results alone may not reveal TF32, for example sums of activations far from 0.
    is_convolution_tf32 = "tf32" in graph.observed_convolution_modes.values()
    distances = oracle.distances(oracle.perturbed_run(runs.case.seed, tf32_products(graph)))
    _state["observed"] = is_convolution_tf32 or _ran_tf32(oracle, distances)
    return distances


def assume(runs: CaseRuns) -> None:
    """Without an oracle of the workload, the user's settings tell whether its products ran in TF32."""
    _state["observed"] = runs.capture.graph.runs_tf32


def tf32_products(graph: Graph) -> Tf32Products:
    """A mode that rounds operands as TF32 does, for the products that may run in TF32 in the reference."""
    return Tf32Products(convolutions=graph.fp32_convolution == "tf32", products=graph.fp32_matmul == "tf32")


def runs_products_in_tf32(graph: Graph, device: str) -> bool:
    """Whether a CPU stands in for a GPU on which the user's program runs products in TF32, which CPUs do not have."""
    return device == "cpu" and "cublas" in graph.tf32_libraries


def _ran_tf32(oracle: OracleRuns, distances: Mapping[int | str, float]) -> bool:
    """Whether the reference's errors are about as large as those of TF32 products."""
    expected, exact = oracle.runs.expected, oracle.exact
    for i, distance in distances.items():
        if isinstance(i, int) and expected[i].is_floating_point() and distance > 0.0:
            error = agreement(expected[i], expected[i], exact[i], 0.0, FACTORS["budget"]).reference_error
            if error >= TF32_SHARE * distance:
                return True
    return False
