"""Activations, arithmetic and chains of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.programs.draft import Draft, Tensor

ACTIVATIONS: Mapping[str, str] = {
    "relu": "F.relu({x})",
    "gelu": "F.gelu({x})",
    "gelu_tanh": 'F.gelu({x}, approximate="tanh")',
    "silu": "F.silu({x})",
    "sigmoid": "torch.sigmoid({x})",
    "tanh": "torch.tanh({x})",
    "leaky_relu": "F.leaky_relu({x}, 0.2)",
    "elu": "F.elu({x})",
    "softplus": "F.softplus({x})",
    "mish": "F.mish({x})",
    "hardswish": "F.hardswish({x})",
    "relu6": "F.relu6({x})",
    "selu": "F.selu({x})",
    "celu": "F.celu({x}, alpha=1.3)",
    "hardsigmoid": "F.hardsigmoid({x})",
    "squared_relu": "F.relu({x}).square()",
    "logsigmoid": "F.logsigmoid({x})",
    "softsign": "F.softsign({x})",
}
LAYERS: Mapping[str, str] = {
    "relu": "nn.ReLU()",
    "gelu": "nn.GELU()",
    "gelu_tanh": 'nn.GELU(approximate="tanh")',
    "silu": "nn.SiLU()",
    "sigmoid": "nn.Sigmoid()",
    "tanh": "nn.Tanh()",
    "leaky_relu": "nn.LeakyReLU(0.2)",
    "elu": "nn.ELU()",
    "mish": "nn.Mish()",
    "hardswish": "nn.Hardswish()",
    "relu6": "nn.ReLU6()",
}
"""Activations that are also written as a layer."""
COMMON = ("relu", "gelu", "gelu_tanh", "silu", "leaky_relu", "elu", "mish", "hardswish", "relu6", "squared_relu")
"""Activations between layers."""
GATES = ("sigmoid", "silu", "gelu", "gelu_tanh", "relu", "tanh", "hardsigmoid")
UNARY: Sequence[str] = (
    "torch.exp(-{x}.abs())",
    "torch.sqrt({x}.abs() + 1e-6)",
    "torch.log1p({x}.abs())",
    "torch.sin({x})",
    "torch.cos({x})",
    "torch.erf({x})",
    "torch.atan({x})",
    "torch.sign({x}) * {x}.abs().sqrt()",
    "torch.rsqrt({x}.square() + 1.0)",
    "{x}.square()",
    "{x}**3",
    "-{x}",
    "{x}.abs()",
    "torch.round({x} * 8.0) / 8.0",
    "torch.nan_to_num({x})",
    "torch.where({x} > 0, {x}, 0.01 * {x})",
    "torch.expm1({x}.clamp(max=4.0))",
    "torch.sigmoid({x})",
    "torch.tanh({x})",
)
BINARY: Sequence[str] = (
    "{x} + {y}",
    "{x} - {y}",
    "{x} * {y}",
    "{x} / ({y}.abs() + 1.0)",
    "torch.maximum({x}, {y})",
    "torch.minimum({x}, {y})",
    "torch.where({y} > 0, {x}, {y})",
    "torch.lerp({x}, {y}, 0.3)",
    "{x} + 0.5 * {y}",
    "torch.atan2({x}, {y}.abs() + 0.1)",
    "torch.hypot({x}, {y})",
    "torch.addcmul({x}, {y}, {y}, value=0.1)",
)


def activation(draft: Draft, x: Tensor, among: Sequence[str] = COMMON, name: str = "h") -> Tensor:
    """One of some activations, as a function or a layer."""
    return activated(draft, x, draft.choose(*among), name)


def activated(draft: Draft, x: Tensor, kind: str, name: str = "h") -> Tensor:
    """The activation of this kind."""
    if draft.is_module and kind in LAYERS and draft.chance(0.4):
        layer = draft.layer("act", LAYERS[kind])
        return draft.then(x, f"{layer}({x})", name)
    return draft.then(x, ACTIVATIONS[kind].format(x=x), name)


def scaled(draft: Draft, x: Tensor) -> Tensor:
    """The tensor times, plus or clamped by a constant."""
    kind = draft.choose("scale", "shift", "clamp", "affine", "divide")
    if kind == "scale":
        text = f"{x} * {draft.number('scale', draft.choose(0.125, 0.5, 0.7071, 1.702, 2.0, 1.414))}"
    elif kind == "shift":
        text = f"{x} + {draft.number('offset', draft.choose(0.1, 0.5, 1.0, 3.0))}"
    elif kind == "clamp":
        low, high = draft.choose((-1.0, 1.0), (0.0, 6.0), (-10.0, 10.0), (-3.0, 3.0))
        text = draft.call(x, "clamp", f"min={low}, max={high}")
    elif kind == "affine":
        text = (
            f"{x} * {draft.number('scale', draft.choose(2.0, 0.25))} + {draft.number('offset', draft.choose(1.0, 0.1))}"
        )
    else:
        text = f"{x} / {draft.number('temperature', draft.choose(0.07, 0.7, 2.0, 8.0))}"
    return draft.then(x, text)


def unary(draft: Draft, x: Tensor) -> Tensor:
    """A function of one tensor."""
    template = draft.choose(*UNARY)
    if template.count("{x}") > 1:
        x = draft.keep(x)
    return draft.then(x, template.format(x=x))


def binary(draft: Draft, x: Tensor, y: Tensor) -> Tensor:
    """A function of two tensors whose shapes broadcast to that of the first one."""
    template = draft.choose(*BINARY)
    if template.count("{y}") > 1:
        y = draft.keep(y, "other")
    if template.startswith("torch.lerp") and y.rank < x.rank:
        template = BINARY[0]
    return draft.then(x, template.format(x=x, y=y))


def chain(draft: Draft, x: Tensor, others: Sequence[Tensor], length: int) -> Tensor:
    """A chain of elementwise operations, which reads each other tensor once."""
    turns = ["other"] * len(others) + ["one"] * max(0, length - len(others))
    draft.random.shuffle(turns)
    remaining = list(others)
    for turn in turns:
        x = binary(draft, x, remaining.pop()) if turn == "other" else draft.apply(x, activation, scaled, unary)
    return x


def dropout(draft: Draft, x: Tensor) -> Tensor:
    """Dropout in eval mode, which is the identity."""
    rate = draft.choose(0.1, 0.2, 0.5)
    if draft.is_module:
        layer = draft.layer("dropout", f"nn.Dropout({rate})")
        return draft.then(x, f"{layer}({x})")
    return draft.then(x, f"F.dropout({x}, p={rate}, training=False)")


def to_float(draft: Draft, x: Tensor, name: str = "x32") -> Tensor:
    """The tensor in float32; itself if it is."""
    if x.dtype == "f32":
        return x
    return draft.then(x, f"{x}.float()" if draft.style.uses_methods else f"{x}.to(torch.float32)", name, dtype="f32")


def like_input(draft: Draft, x: Tensor, reference: Tensor) -> Tensor:
    """The tensor in the dtype of another one."""
    if x.dtype == reference.dtype:
        return x
    text = f"{x}.to({reference}.dtype)" if draft.style.uses_methods else f"{x}.type_as({reference})"
    return draft.then(x, text, dtype=reference.dtype)
