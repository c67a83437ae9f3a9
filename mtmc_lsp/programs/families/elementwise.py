"""Elementwise programs."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.families.inputs import anything, image, rows, tokens
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.elementwise import (
    ACTIVATIONS,
    activated,
    activation,
    binary,
    chain,
    dropout,
    scaled,
    to_float,
    unary,
)


@family()
def elementwise_chain(draft: Draft) -> Outputs:
    """Two to seven elementwise operations on up to three tensors of one shape."""
    x = anything(draft)
    others = [draft.input(name, *x.dims) for name in ("y", "z")[: draft.choose(0, 1, 1, 2)]]
    return chain(draft, x, others, draft.choose(2, 3, 4, 5, 7))


@family("function")
def broadcast_chain(draft: Draft) -> Outputs:
    """Elementwise operations with vectors that broadcast."""
    x = draft.choose(rows, tokens)(draft)
    column = draft.input("gate", *x.dims[:-1], "1")
    vectors = [draft.input(name, x.dims[-1]) for name in ("scale", "shift")[: draft.choose(1, 2)]]
    return chain(draft, x, [*vectors, column][: draft.choose(1, 2, 3)], draft.choose(2, 3, 4, 5))


@family()
def activation_variants(draft: Draft) -> Outputs:
    """One activation, as its formula or between other elementwise operations."""
    x = draft.keep(anything(draft))
    formulas = (
        f"{x} * torch.sigmoid(1.702 * {x})",
        f"0.5 * {x} * (1.0 + torch.erf({x} * 0.7071067811865476))",
        f"0.5 * {x} * (1.0 + torch.tanh(0.7978845608 * ({x} + 0.044715 * {x}.pow(3))))",
        f"{x} * torch.tanh(torch.log(1.0 + torch.exp({x}.clamp(max=20.0))))",
        f"{x} + torch.sin(0.5 * {x}).square() / 0.5",
        f"torch.where({x} > 0, {x}, 1.6733 * (torch.exp({x}.clamp(max=0.0)) - 1.0)) * 1.0507",
        f"{x} * torch.clamp({x} + 3.0, 0.0, 6.0) / 6.0",
        f"torch.sign({x}) * torch.log1p({x}.abs())",
        f"{x} * torch.exp(-{x}.square())",
        f"torch.maximum({x}, 0.1 * {x}) * 1.4142",
        f"{x} / (1.0 + {x}.abs())",
        f"torch.relu({x}) - torch.relu({x} - 6.0)",
        f"{x} * torch.softmax(torch.stack([{x}, torch.zeros_like({x})]), dim=0)[0]",
    )
    kind = draft.choose("formula", "formula", "library")
    if kind == "library":
        h = activated(draft, x, draft.choose(*ACTIVATIONS))
        return draft.apply(h, scaled, unary)
    h = draft.then(x, draft.choose(*formulas), "activated")
    return draft.apply(h, scaled, dropout, unary) if draft.chance(0.6) else h


@family()
def bias_activation(draft: Draft) -> Outputs:
    """Bias, activation and dropout after a product, in several orders."""
    x = draft.choose(rows, tokens, image)(draft)
    bias = draft.parameter("bias", x.dims[1] if x.rank == 4 else x.dims[-1], initial="torch.zeros")
    h = draft.then(x, f"{x} + {bias}{'[:, None, None]' if x.rank == 4 else ''}")
    h = activation(draft, h)
    if draft.chance(0.5):
        h = dropout(draft, h)
    if draft.chance(0.4):
        residual = draft.input("residual", *x.dims)
        h = draft.then(h, draft.choose(f"{residual} + {h}", f"{h} + {residual}", f"{residual} + 0.5 * {h}"))
    return scaled(draft, h) if draft.chance(0.4) else h


@family("function")
def layer_scale_residual(draft: Draft) -> Outputs:
    """What joins a branch and its residual: layer scale, stochastic depth in eval mode, gates."""
    x = tokens(draft)
    residual = draft.input("residual", *x.dims)
    kind = draft.choose("scale", "gate", "alpha", "highway")
    if kind == "scale":
        gamma = draft.input("gamma", x.dims[-1])
        h = draft.then(x, f"{residual} + {gamma} * {x}")
    elif kind == "gate":
        gate = draft.input("gate", x.dims[0], x.dims[-1])
        h = draft.then(x, f"{residual} + torch.tanh({gate}).unsqueeze(1) * {x}")
    elif kind == "alpha":
        h = draft.then(x, f"{residual} * {draft.number('alpha', draft.choose(0.7071, 2.8, 1.19))} + {x}")
    else:
        gate = draft.let("g", f"torch.sigmoid({draft.input('gate', *x.dims)})", x)
        h = draft.let("h", f"{gate} * {x} + (1.0 - {gate}) * {residual}", x)
    return activation(draft, h) if draft.chance(0.6) else scaled(draft, h)


@family("function")
def image_preparation(draft: Draft) -> Outputs:
    """Pixels to the input of a network: scale, normalise, change colours."""
    batch, side = draft.size("B", sizes.BATCH), draft.size("H", sizes.LARGE_IMAGE)
    is_last = draft.chance(0.5)
    dims = (batch, side, side, "3") if is_last else (batch, "3", side, side)
    image_ = draft.input("image", *dims, dtype="u8")
    moved = f"{image_}.permute(0, 3, 1, 2)" if is_last else f"{image_}"
    x: Tensor = draft.let("x", f"{moved}.float() / 255.0", image_, dims=(batch, "3", side, side), dtype="f32")
    steps = draft.random.sample(
        ("brightness", "contrast", "gray", "gamma", "solarize", "normalize", "noise"), draft.choose(1, 2, 3)
    )
    for step in steps:
        x = _colour_step(draft, draft.keep(x, "x"), step)
    if draft.chance(0.4):
        return draft.then(x, f"{x}.to(torch.{draft.choose('float16', 'bfloat16')})")
    return x


def _colour_step(draft: Draft, x: Tensor, step: str) -> Tensor:
    factor = (
        draft.input("factor", x.dims[0], dtype="f32", values="0.5..1.5") if step in ("brightness", "contrast") else x
    )
    if step == "brightness":
        return draft.let("bright", f"({x} * {factor}[:, None, None, None]).clamp(0.0, 1.0)", x)
    if step == "contrast":
        mean = draft.let("mean", f"{x}.mean(dim=(1, 2, 3), keepdim=True)", x)
        return draft.let("contrasted", f"torch.lerp({mean}.expand_as({x}), {x}, {factor}[:, None, None, None])", x)
    if step == "gray":
        weights = f"0.299 * {x}[:, 0] + 0.587 * {x}[:, 1] + 0.114 * {x}[:, 2]"
        gray = draft.let("gray", weights, x)
        return draft.let("mixed", f"0.4 * {x} + 0.6 * {gray}.unsqueeze(1)", x)
    if step == "gamma":
        return draft.let("corrected", f"{x}.clamp(min=1e-6) ** {draft.number('gamma', draft.choose(0.45, 2.2))}", x)
    if step == "solarize":
        return draft.let("solarized", f"torch.where({x} < 0.5, {x}, 1.0 - {x})", x)
    if step == "noise":
        return draft.let("noisy", f"{x} + 0.1 * {draft.input('noise', *x.dims, dtype='f32')}", x)
    mean, std = draft.input("mean", "3", dtype="f32"), draft.input("std", "3", dtype="f32", values="0.2..0.3")
    return draft.let("normalized", f"({x} - {mean}[:, None, None]) / {std}[:, None, None]", x)


@family("function")
def blend(draft: Draft) -> Outputs:
    """Mixed batches and averages of tensors: mixup, noise schedules, weighted sums."""
    x = draft.choose(image, tokens)(draft)
    other = draft.input("other", *x.dims)
    tail = ", None" * (x.rank - 1)
    weight = draft.input("weight", x.dims[0], dtype="f32", values="0..1")
    kind = draft.choose("mix", "noise", "velocity", "roll")
    if kind == "mix":
        lam = draft.let("lam", f"{weight}.to({x}.dtype)[:{tail}]", weight, dtype=x.dtype)
        h = draft.let("mixed", f"{lam} * {x} + (1.0 - {lam}) * {other}", x)
    elif kind == "noise":
        alpha = draft.let("alpha", f"torch.cos({weight} * 1.5707963)[:{tail}]", weight)
        sigma = draft.let("sigma", f"torch.sin({weight} * 1.5707963)[:{tail}]", weight)
        h = draft.let("noisy", f"{alpha} * {x} + {sigma} * {other}", x, dtype="f32")
    elif kind == "velocity":
        t = draft.let("t", f"{weight}[:{tail}]", weight)
        h = draft.let("h", f"({other} - {x}) / (1.0 - {t}).clamp(min=1e-3)", x, dtype="f32")
    else:
        h = draft.let("mixed", f"0.7 * {x} + 0.3 * {other}.flip(0)", x)
    h = draft.apply(h, scaled, unary)
    return binary(draft, h, draft.input("bias", x.dims[-1])) if draft.chance(0.3) else h


@family("function")
def guarded_math(draft: Draft) -> Outputs:
    """Numerically careful scalar functions in float32 around half precision."""
    x = draft.keep(draft.choose(rows, tokens)(draft))
    h = draft.keep(to_float(draft, x))
    formulas = (
        f"torch.log(torch.sigmoid({h}).clamp(1e-6, 1.0 - 1e-6))",
        f"{h}.clamp(min=0.0) + torch.log1p(torch.exp(-{h}.abs()))",
        f"torch.log1p(torch.exp(-{h}.abs())) - {h}.clamp(max=0.0)",
        f"torch.logit(torch.sigmoid({h}), eps=1e-4)",
        f"torch.exp({h}.clamp(-20.0, 5.0)) - 1.0",
        f"torch.where({h}.abs() < 1e-3, 1.0 - {h}.square() / 6.0, torch.sin({h}) / {h})",
        f"torch.asinh({h}) * 2.0 + 1.0",
    )
    h = draft.then(h, draft.choose(*formulas), "safe")
    for _ in range(draft.choose(0, 1, 2)):
        h = scaled(draft, h)
    return draft.then(h, f"{h}.to({x}.dtype)") if h.dtype != x.dtype else h
