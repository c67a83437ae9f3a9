"""Updates of module buffers that torch does best in place, as batch norm does in training.

A functional graph returns each new value as a separate tensor that is copied into the buffer at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.graph import BATCH_NORM, Graph, Node, Ref

RUNNING_STATISTICS = {3: 3, 4: 4}
"""Argument index to result index of :data:`BATCH_NORM`: running mean and running variance, before and after the update."""


@dataclass(frozen=True)
class CallCounter:
    """An integer scalar that grows by a constant with each call, such as ``num_batches_tracked``."""

    input: str
    amount: int


def call_counters(graph: Graph) -> dict[str, CallCounter]:
    """The nodes that update call counters, by node name.

    Nothing else reads the counter before or after, so it may be updated at the end of the call. A separate kernel for one
    number costs a launch; torch updates many counters in one launch.
    """
    counters = {}
    for mutation in graph.mutations:
        node = graph.named.get(mutation.value.name)
        if node is None or node.op != "aten.add.Tensor" or node.kwargs or len(node.args) != 2:
            continue
        before, amount = node.args
        adds_constant = before == Ref(mutation.input) and type(amount) is int
        is_integer_scalar = (
            not node.type.shape
            and node.type.dtype.startswith("int")
            and node.type == graph.type_of(Ref(mutation.input))
        )
        if (
            adds_constant
            and is_integer_scalar
            and not graph.readers(node.name)
            and _is_only_reader(graph, mutation.input, node)
        ):
            assert isinstance(amount, int)
            counters[node.name] = CallCounter(mutation.input, amount)
    return counters


def running_statistics(graph: Graph, node: Node) -> dict[Ref, str]:
    """The running statistics of a batch norm that torch may run in place: each result and the input that it replaces.

    Empty if another node reads the old values, or the tensors that training saves for the backward pass.
    """
    if node.op != BATCH_NORM:
        return {}
    statistics = {}
    for argument, result in RUNNING_STATISTICS.items():
        before, after = node.args[argument], Ref(node.name, result)
        if not isinstance(before, Ref) or graph.written_inputs.get(after) != before.name or after in graph.outputs:
            return {}
        if not _is_only_reader(graph, before.name, node):
            return {}
        statistics[after] = before.name
    used = {ref for reader in graph.readers(node.name) for ref in reader.inputs()} | graph.escaping
    return {} if {Ref(node.name, 1), Ref(node.name, 2)} & used else statistics


def _is_only_reader(graph: Graph, name: str, node: Node) -> bool:
    """Whether ``node`` is the only reader of the input ``name``."""
    return graph.readers(name) == (node,) and Ref(name) not in graph.outputs
