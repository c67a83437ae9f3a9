"""Keeps each recurrent layer a single operation in the graph. Runs in workers.

``torch.export`` unrolls an LSTM over the steps of its sequence, which gives tens of thousands of nodes for one library call.
During a trace, layers call custom operators with the same arguments instead, which appear in the graph as ATen's operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn.modules.rnn import RNNBase

from mtmc_lsp.capture.worker.autocast.regions import is_enabled
from mtmc_lsp.capture.worker.passes.aten_aliases import RECURRENT
from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.graph import RECURRENT_GATES

_ARGUMENTS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"
)


@lru_cache(maxsize=1)
def _operators() -> dict[str, Any]:
    """The operator of each layer, defined once per process."""
    library = torch.library.Library(RECURRENT, "DEF")
    # torch removes the definitions with the library object.
    _LIBRARIES.append(library)
    operators = {}
    for name, gates in RECURRENT_GATES.items():
        states = "Tensor[] hx" if name == "lstm" else "Tensor hx"
        results = "(Tensor, Tensor, Tensor)" if name == "lstm" else "(Tensor, Tensor)"
        library.define(f"{name}(Tensor input, {states}, {_ARGUMENTS}) -> {results}")
        library.impl(name, getattr(torch._C._VariableFunctions, name), "CompositeExplicitAutograd")
        results_of = partial(_lstm if name == "lstm" else _one_state, gates)
        torch.library.register_fake(f"{RECURRENT}::{name}", results_of, lib=library)
        operators[name] = getattr(getattr(torch.ops, RECURRENT), name)
    return operators


_LIBRARIES: list[Any] = []


def _lstm(
    gates: int, x: torch.Tensor, states: Sequence[torch.Tensor], params: Sequence[torch.Tensor], *rest: Any
) -> Any:
    hidden, cell = states
    _check_sizes(gates, x, states, params, rest)
    return _sequence(x, hidden, rest), torch.empty_like(hidden), torch.empty_like(cell)


def _one_state(gates: int, x: torch.Tensor, hidden: torch.Tensor, params: Sequence[torch.Tensor], *rest: Any) -> Any:
    _check_sizes(gates, x, [hidden], params, rest)
    return _sequence(x, hidden, rest), torch.empty_like(hidden)


def _check_sizes(
    gates: int, x: torch.Tensor, states: Sequence[torch.Tensor], params: Sequence[torch.Tensor], rest: Sequence[Any]
) -> None:
    """Assert the size relations of the layer, so that the graph knows which sizes are independent."""
    has_biases, layers, _, _, bidirectional, batch_first = rest
    hidden = states[0].shape[-1]
    directions, per_direction = 2 if bidirectional else 1, 4 if has_biases else 2
    for state in states:
        torch._check(state.shape[0] == layers * directions)
        torch._check(state.shape[-1] == hidden)
        if x.dim() == 3:
            torch._check(state.shape[1] == x.shape[0 if batch_first else 1])
    for number in range(layers * directions):
        width = x.shape[-1] if number < directions else directions * hidden
        weight_ih, weight_hh, *biases = params[number * per_direction : (number + 1) * per_direction]
        torch._check(weight_ih.shape[1] == width)
        torch._check(weight_hh.shape[1] == hidden)
        for tensor in (weight_ih, weight_hh, *biases):
            torch._check(tensor.shape[0] == gates * hidden)


def _sequence(x: torch.Tensor, hidden: torch.Tensor, rest: Sequence[Any]) -> torch.Tensor:
    """The output sequence of a layer: ``[T, B, directions * H]``, or a transposed view of it, ``[B, T, directions * H]``."""
    width = (2 if rest[4] else 1) * hidden.shape[-1]
    if x.dim() == 2:
        return x.new_empty((x.shape[0], width))
    batch_first = rest[5]
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    output = x.new_empty((steps, batch, width))
    return output.transpose(0, 1) if batch_first else output


@contextlib.contextmanager
def single_recurrent_operators() -> Iterator[None]:
    """While entered, each recurrent layer that draws no random numbers is a single operation."""
    functions, operators = torch._VF, _operators()

    def replacement(name: str) -> Any:
        original, operator = getattr(torch._C._VariableFunctions, name), operators[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            # For packed sequences, the second argument holds batch sizes. Dropout draws random numbers.
            packed = isinstance(args[1], torch.Tensor) if name == "lstm" else isinstance(args[2], torch.Tensor)
            if is_enabled():
                raise TargetUnsupported(
                    "the code runs a recurrent layer under autocast, whose casts torch leaves to the library",
                    remedy="Convert the layer instead: module.to(torch.bfloat16).",
                )
            dropout, in_training = args[5], args[6]
            if kwargs or packed or (in_training and dropout) or _is_projected(name, args):
                return original(*args, **kwargs)
            states = list(args[1]) if name == "lstm" else args[1]
            return operator(args[0], states, list(args[2]), *args[3:])

        return call

    for name in RECURRENT_GATES:
        setattr(functions, name, replacement(name))
    # A layer caches a list of its weights, which would ignore the weights that functional_call substitutes.
    RNNBase._flat_weights = property(_weights, lambda self, value: None)
    try:
        yield
    finally:
        del RNNBase._flat_weights
        for name in RECURRENT_GATES:
            delattr(functions, name)


def _weights(layer: Any) -> list[Any]:
    return [getattr(layer, name, None) for name in layer._flat_weights_names]


def _is_projected(name: str, args: Sequence[Any]) -> bool:
    """Whether an LSTM projects its hidden states to a smaller size."""
    return name == "lstm" and args[1][0].shape[-1] != args[1][1].shape[-1]
