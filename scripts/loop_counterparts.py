"""How other libraries compute the loops of ``benchmarks/loops``: kernels written by hand for the same recurrence."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from compared import BENCHMARKS, Tensors
from torch._inductor import config as inductor
from torch.nn import functional as F

LOOPS = BENCHMARKS / "loops"
CELLS = BENCHMARKS / "loops_cudnn"
"""Cells with the sizes and weights of layers that cuDNN computes."""
FLA, CUDNN, TORCH = "flash-linear-attention", "cuDNN", "torch"

Call = Callable[[], Any]
Make = Callable[[Any, Tensors], Call]
"""From the module of a target (None for a function) and its inputs to a call with the results of the target.

What it does before the call has no time: layouts, logarithms of gates that are inputs, weights. What the target computes from its
inputs in an iteration has."""


@dataclass(frozen=True)
class Contender:
    """A kernel, or several, that compute a target."""

    make: Make
    is_rounded: bool = False
    """Whether it rounds float32 operands of products to TF32."""


@dataclass(frozen=True)
class Counterpart:
    """How a library computes a target."""

    library: str
    contenders: Mapping[str, Contender]
    """By name. The fastest counts."""
    suite: Path = LOOPS
    is_last: bool = False
    """Whether the row runs after all others, because tuning its kernels takes minutes."""


def _log(gate: torch.Tensor) -> torch.Tensor:
    """The logarithm of a gate; a gate of zero becomes the smallest number, so that differences of logarithms are numbers."""
    return gate.clamp_min(torch.finfo(gate.dtype).tiny).log()


def _library(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


# flash-linear-attention -------------------------------------------------------------------------------------------


def _linear_recurrence(name: str) -> Make:
    def make(module: Any, inputs: Tensors) -> Call:
        hgrn, x, g = _library("fla.ops.hgrn", name), inputs["b"], _log(inputs["a"])
        return lambda: hgrn(x, g)[0]

    return make


def _forget_mult(name: str, compiled: bool) -> Make:
    """The gates are computed by torch: the recurrence of the library begins with their logarithms."""

    def make(module: Any, inputs: Tensors) -> Call:
        hgrn, bias = _library("fla.ops.hgrn", name), module.bias
        z, f, o = (inputs[key].transpose(0, 1).contiguous() for key in "zfo")

        def gates(z: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            f = f + bias
            return torch.sigmoid(-f) * torch.tanh(z), F.logsigmoid(f)

        def output(o: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(o) * c

        inductor.compile_threads = 1
        first, last = (torch.compile(gates), torch.compile(output)) if compiled else (gates, output)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            x, g = first(z, f)
            states, c = hgrn(x, g, output_final_state=True)
            return last(o, states).transpose(0, 1), c

        return call

    return make


def _linear_attention(name: str) -> Make:
    def make(module: Any, inputs: Tensors) -> Call:
        gla = _library("fla.ops.simple_gla", name)
        q, k, v, g = (inputs[key].unsqueeze(2) for key in "qkvg")
        g = _log(g)
        return lambda: gla(q, k, v, g=g, scale=1.0)[0].squeeze(2)

    return make


def _delta_memory(module: Any, inputs: Tensors) -> Call:
    """The values of a head are one column. The library's kernel for chunks takes no float32."""
    rule = _library("fla.ops.delta_rule", "fused_recurrent_delta_rule")
    q, k, v, beta = (inputs[key].transpose(1, 2).contiguous() for key in ("q", "k", "v", "beta"))
    v = v.unsqueeze(-1)
    return lambda: rule(q, k, v, beta, scale=1.0)[0].squeeze(-1).transpose(1, 2)


def _wkv(module: Any, inputs: Tensors) -> Call:
    wkv, (w, u, k, v) = _library("fla.ops.rwkv4", "fused_recurrent_rwkv4"), inputs.values()
    state = k.new_zeros(k.shape[0], 3, 1, k.shape[2])
    state[:, 2] = -1e38
    return lambda: wkv(w, u, k, v, state)[0]


def _fla(make: Callable[[str], Make], names: Iterable[str]) -> Counterpart:
    return Counterpart(FLA, {name: Contender(make(name)) for name in names})


# cuDNN ------------------------------------------------------------------------------------------------------------


def _layer(kind: type[nn.RNNBase], like: torch.Tensor, weights: Iterable[torch.Tensor], **options: Any) -> nn.RNNBase:
    """A layer of cuDNN with some weights: of the input, of the state, and their biases."""
    w_ih, w_hh, b_ih, b_hh = weights
    layer = kind(w_ih.shape[1], w_hh.shape[1], **options).to(like.device).eval()
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), (w_ih, w_hh, b_ih, b_hh), strict=True):
            parameter.copy_(weight)
    return layer


def _cudnn(make: Make, suite: Path = LOOPS) -> Counterpart:
    """cuDNN with products in IEEE arithmetic, as in eager mode, and in TF32, which torch allows cuDNN by default."""

    def with_precision(is_rounded: bool) -> Make:
        def made(module: Any, inputs: Tensors) -> Call:
            call = make(module, inputs)

            def run() -> Any:
                before = torch.backends.cudnn.allow_tf32
                torch.backends.cudnn.allow_tf32 = is_rounded
                try:
                    return call()
                finally:
                    torch.backends.cudnn.allow_tf32 = before

            return run

        return made

    contenders = {"ieee": Contender(with_precision(False)), "tf32": Contender(with_precision(True), is_rounded=True)}
    return Counterpart(CUDNN, contenders, suite)


def _elman(module: Any, inputs: Tensors) -> Call:
    x, w, u, b = inputs.values()
    layer = _layer(nn.RNN, x, (w.T, u.T, b, torch.zeros_like(b)), batch_first=True)
    return lambda: layer(x)[0]


def _gru_cell(module: Any, inputs: Tensors) -> Call:
    cell, x = module.cell, inputs["x"]
    layer = _layer(nn.GRU, x, (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh))

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        states, last = layer(x)
        return states, last[0]

    return call


def _gated_memory(module: Any, inputs: Tensors) -> Call:
    x = inputs["x"]
    gates = (module.input_gate, module.forget_gate, module.candidate, module.output_gate)
    weight, bias = torch.cat([gate.weight for gate in gates]), torch.cat([gate.bias for gate in gates])
    w_ih, w_hh = weight.split((x.shape[2], module.hidden), dim=1)
    layer = _layer(nn.LSTM, x, (w_ih, w_hh, bias, torch.zeros_like(bias)), batch_first=True)

    def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        states, (h, c) = layer(x)
        return states, h[0], c[0]

    return call


def _tagger(module: Any, inputs: Tensors) -> Call:
    """The output layer is one product of all states."""
    x, h = inputs["x"], inputs["h"].unsqueeze(0)
    linear = module.recurrent
    w_ih, w_hh = linear.weight.split((x.shape[2], h.shape[2]), dim=1)
    layer = _layer(nn.RNN, x, (w_ih, w_hh, linear.bias, torch.zeros_like(linear.bias)))
    return lambda: module.output(layer(x, h)[0])


def _lstm(module: Any, inputs: Tensors) -> Call:
    x, *weights = inputs.values()
    layer = _layer(nn.LSTM, x, weights)

    def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        states, (h, c) = layer(x)
        return states, h[0], c[0]

    return call


def _gru(module: Any, inputs: Tensors) -> Call:
    x, *weights = inputs.values()
    layer = _layer(nn.GRU, x, weights)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        states, h = layer(x)
        return states, h[0]

    return call


# torch ------------------------------------------------------------------------------------------------------------


def _torch(name: str, make: Make) -> Counterpart:
    return Counterpart(TORCH, {name: Contender(make)})


def _log_sum_exp(module: Any, inputs: Tensors) -> Call:
    scores = inputs["scores"]
    return lambda: scores.logcumsumexp(1)


def _drawdowns(module: Any, inputs: Tensors) -> Call:
    prices = inputs["prices"]
    return lambda: 1 - prices / prices.cummax(1).values


HGRN = ("chunk_hgrn", "fused_recurrent_hgrn")
COUNTERPARTS: Mapping[str, Counterpart] = {
    "recurrences::linear_recurrence": _fla(_linear_recurrence, HGRN),
    "few_states::long_recurrence": _fla(_linear_recurrence, HGRN),
    "recurrences::ForgetMult.forward": Counterpart(
        FLA,
        {
            f"{name}{', compiled gates' if compiled else ''}": Contender(_forget_mult(name, compiled))
            for name in HGRN
            for compiled in (False, True)
        },
    ),
    "recurrences::wkv": Counterpart(FLA, {"fused_recurrent_rwkv4": Contender(_wkv)}),
    "recurrences::delta_memory": Counterpart(FLA, {"fused_recurrent_delta_rule": Contender(_delta_memory)}),
    "cells::linear_attention": Counterpart(
        FLA,
        {
            "chunk_simple_gla": Contender(_linear_attention("chunk_simple_gla"), is_rounded=True),
            "fused_recurrent_simple_gla": Contender(_linear_attention("fused_recurrent_simple_gla")),
        },
        # ``chunk_simple_gla`` compiles and times 48 configurations of one kernel.
        is_last=True,
    ),
    "cells::elman": _cudnn(_elman),
    "cells::GRUSteps.forward": _cudnn(_gru_cell),
    "cells::GatedMemory.forward": _cudnn(_gated_memory),
    "cells::Tagger.forward": _cudnn(_tagger),
    **{f"cudnn_cells::lstm_{size}": _cudnn(_lstm, CELLS) for size in (128, 256, 512)},
    **{f"cudnn_cells::gru_{size}": _cudnn(_gru, CELLS) for size in (128, 256, 512)},
    "few_states::running_log_sum_exp": _torch("logcumsumexp", _log_sum_exp),
    "few_states::drawdowns": _torch("cummax", _drawdowns),
}
