"""Normalisations: as a layer, as a function of torch, or written out."""

from __future__ import annotations

from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.pieces.elementwise import like_input, to_float
from mtmc_lsp.programs.sizes import GROUPS

EPS = (1e-5, 1e-6, 1e-12)


def layer_norm(draft: Draft, x: Tensor, name: str = "norm", *, affine: bool = True) -> Tensor:
    """LayerNorm over the last dimension."""
    width, eps = x.dims[-1], draft.choose(*EPS[:2])
    if draft.is_module:
        layer = draft.layer(name, f"nn.LayerNorm({draft.constructed(width)}{'' if eps == 1e-5 else f', eps={eps}'})")
        return draft.then(x, f"{layer}({x})")
    weights = (
        f", {draft.parameter(f'{name}_weight', width)}, {draft.parameter(f'{name}_bias', width)}" if affine else ""
    )
    x = draft.keep(x, "x")
    return draft.then(x, f"F.layer_norm({x}, ({x}.shape[-1],){weights}, eps={eps})")


def written_layer_norm(draft: Draft, x: Tensor, name: str = "norm") -> Tensor:
    """LayerNorm as its formula."""
    original = draft.keep(x, "x")
    x = draft.keep(to_float(draft, original), "x32")
    eps = draft.number("eps", draft.choose(*EPS))
    mean = draft.let("mean", draft.call(x, "mean", "dim=-1, keepdim=True"), x, dims=(*x.dims[:-1], "1"))
    kind = draft.choose("var", "square", "moments")
    if kind == "var":
        variance = draft.let("var", draft.call(x, "var", "dim=-1, keepdim=True, unbiased=False"), mean)
        normal = f"({x} - {mean}) / torch.sqrt({variance} + {eps})"
    elif kind == "square":
        centered = draft.let("centered", f"{x} - {mean}", x)
        variance = draft.let("var", f"{centered}.pow(2).mean(dim=-1, keepdim=True)", mean)
        normal = f"{centered} * torch.rsqrt({variance} + {eps})"
    else:
        variance = draft.let("var", f"{x}.square().mean(dim=-1, keepdim=True) - {mean}.square()", mean)
        normal = f"({x} - {mean}) * torch.rsqrt({variance}.clamp(min=0.0) + {eps})"
    h = draft.let("normed", normal, x)
    if draft.chance(0.8):
        weight, bias = draft.parameter(f"{name}_weight", x.dims[-1]), draft.parameter(f"{name}_bias", x.dims[-1])
        h = draft.then(h, f"{h} * {weight} + {bias}")
    return like_input(draft, h, original)


def rms_norm(draft: Draft, x: Tensor, name: str = "norm", *, affine: bool = True) -> Tensor:
    """RMSNorm over the last dimension, as model files write it."""
    original = draft.keep(x, "x")
    width = original.dims[-1]
    if draft.chance(0.15):
        scale = f", {draft.parameter(f'{name}_weight', width)}" if affine else ""
        return draft.then(x, f"F.rms_norm({original}, ({original}.shape[-1],){scale}, eps=1e-6)")
    x = draft.keep(to_float(draft, original), "x32")
    eps, narrow = draft.number("eps", draft.choose(*EPS[:2])), (*x.dims[:-1], "1")
    square = draft.choose(f"{x}.pow(2)", f"{x}.square()", f"{x} * {x}")
    square = f"({square})" if "*" in square and "(" not in square else square
    kind = draft.choose("rsqrt", "sqrt", "norm", "clamped")
    if kind == "rsqrt":
        h = draft.let("normed", f"{x} * torch.rsqrt({square}.mean(-1, keepdim=True) + {eps})", x)
    elif kind == "sqrt":
        rms = draft.let("rms", f"torch.sqrt({square}.mean(dim=-1, keepdim=True) + {eps})", x, dims=narrow)
        h = draft.let("normed", f"{x} / {rms}", x)
    elif kind == "norm":
        rms = draft.let("rms", f"{x}.norm(dim=-1, keepdim=True) * {x}.shape[-1] ** -0.5", x, dims=narrow)
        h = draft.let("normed", f"{x} / ({rms} + {eps})", x)
    else:
        rms = draft.let("rms", f"{square}.mean(-1, keepdim=True).sqrt().clamp(min={eps})", x, dims=narrow)
        h = draft.let("normed", f"{x} / {rms}", x)
    if not affine:
        return like_input(draft, h, original)
    weight = draft.parameter(f"{name}_weight", width)
    if draft.chance(0.5):
        h = like_input(draft, h, original)
        return draft.then(h, f"{h} * {weight}")
    factor = f"{weight}.float()" if x.dtype != original.dtype else f"{weight}"
    shifted = f"(1.0 + {factor})" if draft.chance(0.4) else factor
    return like_input(draft, draft.then(h, f"{h} * {shifted}"), original)


def group_norm(draft: Draft, x: Tensor, name: str = "norm") -> Tensor:
    """GroupNorm over channels in dimension 1."""
    groups, channels = draft.choose(*GROUPS), x.dims[1]
    if draft.is_module:
        layer = draft.layer(name, f"nn.GroupNorm({groups}, {draft.constructed(channels)})")
        return draft.then(x, f"{layer}({x})")
    weight, bias = draft.parameter(f"{name}_weight", channels), draft.parameter(f"{name}_bias", channels)
    return draft.then(x, f"F.group_norm({x}, {groups}, {weight}, {bias}, eps={draft.choose(*EPS[:2])})")


def batch_norm(draft: Draft, x: Tensor, name: str = "bn") -> Tensor:
    """BatchNorm in eval mode."""
    channels, rank = x.dims[1], max(1, x.rank - 2)
    if draft.is_module:
        layer = draft.layer(name, f"nn.BatchNorm{rank}d({draft.constructed(channels)})")
        return draft.then(x, f"{layer}({x})")
    mean = draft.input("running_mean", channels)
    variance = draft.input("running_var", channels, values="0.5..1.5")
    weight, bias = draft.parameter(f"{name}_weight", channels), draft.parameter(f"{name}_bias", channels)
    if draft.chance(0.5):
        return draft.then(x, f"F.batch_norm({x}, {mean}, {variance}, {weight}, {bias}, training=False, eps=1e-5)")
    shape = f"[None, :{', None' * (x.rank - 2)}]"
    scale = draft.let("scale", f"{weight} * torch.rsqrt({variance} + 1e-5)", weight)
    return draft.then(x, f"({x} - {mean}{shape}) * {scale}{shape} + {bias}{shape}")


def instance_norm(draft: Draft, x: Tensor, name: str = "norm") -> Tensor:
    """InstanceNorm over the spatial dimensions."""
    if draft.chance(0.4):
        if draft.is_module:
            layer = draft.layer(name, f"nn.InstanceNorm{x.rank - 2}d({draft.constructed(x.dims[1])}, affine=True)")
            return draft.then(x, f"{layer}({x})")
        return draft.then(x, f"F.instance_norm({x}, eps=1e-5)")
    dims = tuple(range(2, x.rank))
    shown, narrow = str(dims) if len(dims) > 1 else str(dims[0]), (*x.dims[:2], *["1"] * len(dims))
    x = draft.keep(x, "x")
    mean = draft.let("mean", draft.call(x, "mean", f"dim={shown}, keepdim=True"), x, dims=narrow)
    spread = draft.choose("std", "var")
    deviation = draft.let(spread, draft.call(x, spread, f"dim={shown}, keepdim=True"), mean)
    below = f"({deviation} + 1e-6)" if spread == "std" else f"torch.sqrt({deviation} + 1e-5)"
    return draft.let("normed", f"({x} - {mean}) / {below}", x)


def l2_normalized(draft: Draft, x: Tensor, dim: int = -1) -> Tensor:
    """Vectors of length 1."""
    kind = draft.choose("function", "norm", "sum")
    if kind == "function":
        return draft.then(x, f"F.normalize({x}, dim={dim})", "normed")
    x = draft.keep(x, "x")
    if kind == "norm":
        return draft.then(x, f"{x} / {x}.norm(dim={dim}, keepdim=True).clamp(min=1e-6)", "normed")
    return draft.then(x, f"{x} * torch.rsqrt({x}.square().sum(dim={dim}, keepdim=True) + 1e-8)", "normed")


TOKEN_NORMS = (layer_norm, layer_norm, rms_norm, rms_norm, written_layer_norm)
IMAGE_NORMS = (batch_norm, batch_norm, group_norm, group_norm, instance_norm)


def token_norm(draft: Draft, x: Tensor, name: str = "norm") -> Tensor:
    """A normalisation of tokens."""
    return draft.choose(*TOKEN_NORMS)(draft, x, name)


def image_norm(draft: Draft, x: Tensor, name: str = "norm") -> Tensor:
    """A normalisation of channels."""
    return draft.choose(*IMAGE_NORMS)(draft, x, name)
