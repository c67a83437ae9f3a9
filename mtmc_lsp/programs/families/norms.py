"""Normalisations with what surrounds them."""

from __future__ import annotations

from mtmc_lsp.programs.draft import Draft
from mtmc_lsp.programs.families.inputs import image, rows, signal, tokens
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.elementwise import activation, dropout, scaled
from mtmc_lsp.programs.pieces.norms import (
    batch_norm,
    group_norm,
    image_norm,
    instance_norm,
    l2_normalized,
    layer_norm,
    rms_norm,
    token_norm,
    written_layer_norm,
)


@family()
def layer_norms(draft: Draft) -> Outputs:
    """LayerNorm, as a layer, a call or a formula, with an activation or a scale."""
    x = draft.choose(rows, tokens)(draft)
    h = draft.apply(x, layer_norm, written_layer_norm)
    return draft.apply(h, activation, scaled, dropout) if draft.chance(0.6) else h


@family()
def rms_norms(draft: Draft) -> Outputs:
    """RMSNorm in the variants of model files."""
    x = draft.choose(rows, tokens)(draft)
    h = rms_norm(draft, x, affine=draft.chance(0.85))
    return draft.apply(h, activation, scaled) if draft.chance(0.4) else h


@family()
def gated_norm(draft: Draft) -> Outputs:
    """A normalised tensor times a gate, before or after the normalisation."""
    x = tokens(draft)
    gate = draft.input("gate", *x.dims)
    gated = activation(draft, gate, ("silu", "sigmoid", "gelu"), "g")
    if draft.chance(0.5):
        return rms_norm(draft, draft.let("gated", f"{x} * {gated}", x))
    h = token_norm(draft, x)
    return draft.then(h, f"{h} * {gated}")


@family()
def group_norms(draft: Draft) -> Outputs:
    """GroupNorm with activation, scale and shift or a residual."""
    x = draft.choose(image, image, signal)(draft)
    h = group_norm(draft, draft.keep(x))
    kind = draft.choose("activation", "modulated", "residual", "scaled")
    if kind == "modulated":
        embedding = draft.input("emb", x.dims[0], f"2*{x.dims[1]}")
        scale, shift = draft.unpack(
            ("scale", "shift"), f"{embedding}[:, :{', None' * (x.rank - 2)}].chunk(2, dim=1)", x, x.dims[:2]
        )
        h = draft.then(h, f"{h} * (1.0 + {scale}) + {shift}")
        return activation(draft, h)
    if kind == "residual":
        h = activation(draft, h)
        return draft.then(h, f"{x} + {h}")
    return activation(draft, h) if kind == "activation" else scaled(draft, h)


@family()
def batch_norms(draft: Draft) -> Outputs:
    """BatchNorm in eval mode with residual and activation."""
    x = draft.choose(image, image, signal)(draft)
    h = batch_norm(draft, x)
    if draft.chance(0.4):
        h = draft.then(h, f"{h} + {draft.input('identity', *x.dims)}")
    h = activation(draft, h) if draft.chance(0.8) else scaled(draft, h)
    return scaled(draft, h) if draft.chance(0.3) else h


@family()
def instance_norms(draft: Draft) -> Outputs:
    """InstanceNorm and style transfer: statistics of each channel of an image."""
    x = draft.choose(image, image, signal)(draft)
    h = instance_norm(draft, x)
    if draft.chance(0.5):
        tail = ", None" * (x.rank - 2)
        style = draft.input("style", x.dims[0], x.dims[1])
        bias = draft.input("style_bias", x.dims[0], x.dims[1])
        h = draft.then(h, f"{h} * {style}[:, :{tail}] + {bias}[:, :{tail}]")
    return activation(draft, h) if draft.chance(0.6) else h


@family()
def channel_layer_norm(draft: Draft) -> Outputs:
    """LayerNorm over the channels of an image, channels first."""
    x = draft.keep(image(draft))
    eps = draft.number("eps", draft.choose(1e-5, 1e-6))
    weight, bias = draft.parameter("weight", x.dims[1]), draft.parameter("bias", x.dims[1], initial="torch.zeros")
    narrow = (x.dims[0], "1", *x.dims[2:])
    if draft.chance(0.3):
        h = draft.let("h", f"F.layer_norm({x}.permute(0, 2, 3, 1), ({x}.shape[1],), {weight}, {bias}, 1e-6)", x)
        h = draft.let("h", f"{h}.permute(0, 3, 1, 2)", x)
    elif draft.chance(0.5):
        mean = draft.let("mean", f"{x}.mean(1, keepdim=True)", x, dims=narrow)
        variance = draft.let("var", f"({x} - {mean}).pow(2).mean(1, keepdim=True)", x, dims=narrow)
        h = draft.let("h", f"({x} - {mean}) / torch.sqrt({variance} + {eps})", x)
        h = draft.let("h", f"{weight}[:, None, None] * {h} + {bias}[:, None, None]", x)
    else:
        scale = draft.let("scale", f"torch.rsqrt({x}.square().mean(dim=1, keepdim=True) + {eps})", x, dims=narrow)
        h = draft.let("h", f"{x} * {scale} * {weight}[None, :, None, None]", x)
    return activation(draft, h) if draft.chance(0.5) else h


@family("function")
def unit_vectors(draft: Draft) -> Outputs:
    """Vectors of length 1 and cosine similarity."""
    x = draft.choose(rows, tokens)(draft, draft.choose("x", "embeddings"))
    kind = draft.choose("scaled", "cosine", "both", "centered")
    if kind == "scaled":
        h = l2_normalized(draft, x)
        return scaled(draft, h) if draft.chance(0.6) else draft.then(h, f"{h} * {draft.input('g', x.dims[-1])}")
    if kind == "centered":
        x = draft.keep(x)
        return l2_normalized(draft, draft.let("centered", f"{x} - {x}.mean(dim=-1, keepdim=True)", x))
    y = draft.input("other", *x.dims)
    if kind == "cosine" and draft.chance(0.4):
        h = draft.let("similarity", f"F.cosine_similarity({x}, {y}, dim=-1)", x, dims=x.dims[:-1])
    else:
        a, b = draft.keep(l2_normalized(draft, x)), draft.keep(l2_normalized(draft, y))
        h = draft.let("similarity", f"({a} * {b}).sum(dim=-1)", x, dims=x.dims[:-1])
    return draft.then(h, draft.choose(f"1.0 - {h}", f"(1.0 - {h}).mean()", f"{h} / 0.07", f"{h}.clamp(min=0.0)"))


@family()
def residual_norm(draft: Draft) -> Outputs:
    """A residual added and normalised, before or after the sublayer."""
    x = tokens(draft)
    residual = draft.input("residual", *x.dims)
    h = dropout(draft, x) if draft.chance(0.4) else x
    if draft.chance(0.3):
        h = draft.then(h, f"{h} + {draft.parameter('bias', x.dims[-1])}")
    order = draft.choose("add_norm", "add_norm", "norm_add", "sandwich")
    if order == "norm_add":
        normed = token_norm(draft, h)
        return draft.then(normed, f"{residual} + {normed}")
    total = draft.let("total", draft.choose(f"{h} + {residual}", f"{residual} + {h}", f"{residual} * 0.7071 + {h}"), x)
    total = draft.keep(total)
    normed = token_norm(draft, total)
    if order == "sandwich":
        return token_norm(draft, normed, "post_norm")
    return (normed, total) if draft.chance(0.6) else normed


@family()
def norm_activation_image(draft: Draft) -> Outputs:
    """Pre-activation of convolutional networks, with a residual or a scale."""
    x = image(draft)
    identity = draft.input("identity", *x.dims)
    h = image_norm(draft, x)
    first = draft.chance(0.5)
    if first:
        h = activation(draft, h)
    h = draft.then(h, draft.choose(f"{h} + {identity}", f"{identity} + {h}", f"({h} + {identity}) * 0.7071"))
    return h if first else activation(draft, h)
