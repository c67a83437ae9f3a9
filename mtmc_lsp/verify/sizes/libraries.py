"""What the libraries of a GPU compute in a network's graph, so that a process can load them before it is needed."""

from __future__ import annotations

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import PRODUCTS, Graph
from mtmc_lsp.process.messages import Libraries
from mtmc_lsp.verify.sizes.case_sizes import is_network


def libraries_of(graph: Graph, *, has_oracle: bool = False) -> Libraries:
    """The dtypes of a network's products and convolutions; none for other graphs, whose kernels may replace the libraries.

    Args:
        has_oracle: whether the process also runs the code in float64.
    """
    if not is_network(graph):
        return Libraries()
    products, convolutions = set[str](), set[str]()
    for node in graph.nodes:
        word = node.op.split(".")[1]
        found = convolutions if word.startswith("conv") else products if word in PRODUCTS else None
        if found is not None and is_float(dtype := node.outputs[0].dtype):
            found.update((dtype, "float64") if has_oracle else (dtype,))
    return Libraries(tuple(sorted(products)), tuple(sorted(convolutions)))
