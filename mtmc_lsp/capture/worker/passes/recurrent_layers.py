"""Recurrent layers stay one operation each in a graph. Runs in workers.

PyTorch's own tracing unrolls an LSTM over every step of its sequence, to tens of thousands of nodes of which a library's one
call is made on a GPU. While a target is traced, its layers call operators of ours that take the same arguments, and the graph
shows these as ATen's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn.modules.rnn import RNNBase

from mtmc_lsp.capture.worker.passes.aten_aliases import RECURRENT
from mtmc_lsp.capture.worker.side_effects import access_of
from mtmc_lsp.core.graph import RECURRENT_GATES

_REST = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"
)


@lru_cache(maxsize=1)
def _operators() -> dict[str, Any]:
    """Each layer's operator, defined once in a process."""
    library = torch.library.Library(RECURRENT, "DEF")
    # Without a reference the definitions go with the library.
    _KEPT.append(library)
    found = {}
    for name, gates in RECURRENT_GATES.items():
        states = "Tensor[] hx" if name == "lstm" else "Tensor hx"
        results = "(Tensor, Tensor, Tensor)" if name == "lstm" else "(Tensor, Tensor)"
        library.define(f"{name}(Tensor input, {states}, {_REST}) -> {results}")
        library.impl(name, getattr(torch._C._VariableFunctions, name), "CompositeExplicitAutograd")
        results_of = partial(_lstm if name == "lstm" else _one_state, gates)
        torch.library.register_fake(f"{RECURRENT}::{name}", results_of, lib=library)
        found[name] = getattr(getattr(torch.ops, RECURRENT), name)
    return found


_KEPT: list[Any] = []


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
    """Tie the sizes of all tensors, as the layer asks for: a graph says by them which sizes are free."""
    has_biases, layers, _, _, bidirectional, batch_first = rest
    hidden = states[0].shape[-1]
    directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
    for state in states:
        torch._check(state.shape[0] == layers * directions)
        torch._check(state.shape[-1] == hidden)
        if x.dim() == 3:
            torch._check(state.shape[1] == x.shape[0 if batch_first else 1])
    for number in range(layers * directions):
        width = x.shape[-1] if number < directions else directions * hidden
        weight_ih, weight_hh, *biases = params[number * each : (number + 1) * each]
        torch._check(weight_ih.shape[1] == width)
        torch._check(weight_hh.shape[1] == hidden)
        for tensor in (weight_ih, weight_hh, *biases):
            torch._check(tensor.shape[0] == gates * hidden)


def _sequence(x: torch.Tensor, hidden: torch.Tensor, rest: Sequence[Any]) -> torch.Tensor:
    """What a layer gives for each step: ``[T, B, directions * H]``, or that seen as ``[B, T, directions * H]``."""
    width = (2 if rest[4] else 1) * hidden.shape[-1]
    if x.dim() == 2:
        return x.new_empty((x.shape[0], width))
    batch_first = rest[5]
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    made = x.new_empty((steps, batch, width))
    return made.transpose(0, 1) if batch_first else made


def without_idle_modes(instance: torch.nn.Module | None, reads: dict[str, object]) -> dict[str, object]:
    """What was read of a target's modules, without the mode of recurrent layers that have no dropout: it changes nothing there.

    Args:
        instance: the target, where it is a module.
        reads: values by their access in the target, ``self.layers[0].training``.
    """
    layers = instance.named_modules() if instance is not None else ()
    idle = {
        access_of(f"{name}.training") for name, layer in layers if isinstance(layer, RNNBase) and layer.dropout == 0.0
    }
    return {access: value for access, value in reads.items() if access not in idle}


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """While in it, recurrent layers that draw no random numbers are one operation each."""
    functions, operators = torch._VF, _operators()

    def through(name: str) -> Any:
        own, operator = getattr(torch._C._VariableFunctions, name), operators[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            # Packed sequences come with the sizes of their batches in the second place; dropout draws random numbers.
            packed = isinstance(args[1], torch.Tensor) if name == "lstm" else isinstance(args[2], torch.Tensor)
            dropout, in_training = args[5], args[6]
            if kwargs or packed or (in_training and dropout) or _is_projected(name, args):
                return own(*args, **kwargs)
            states = list(args[1]) if name == "lstm" else args[1]
            return operator(args[0], states, list(args[2]), *args[3:])

        return call

    for name in RECURRENT_GATES:
        setattr(functions, name, through(name))
    # A layer keeps a list of its weights, which does not follow where a call is made with others in their place.
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
    """Whether an LSTM's hidden states are smaller than its cells'."""
    return name == "lstm" and args[1][0].shape[-1] != args[1][1].shape[-1]
