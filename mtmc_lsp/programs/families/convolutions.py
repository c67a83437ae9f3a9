"""Convolutions and pooling with what follows them."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import UNKNOWN, Draft, Tensor
from mtmc_lsp.programs.families.inputs import image, signal
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.convolutions import convolution, global_pooled, pooled
from mtmc_lsp.programs.pieces.elementwise import activation, scaled, unary
from mtmc_lsp.programs.pieces.norms import batch_norm, image_norm


def _epilogue(draft: Draft, h: Tensor) -> Tensor:
    for _ in range(draft.choose(0, 1, 1, 2, 3)):
        h = draft.apply(h, activation, scaled, unary)
    return h


@family()
def conv1d(draft: Draft) -> Outputs:
    """A convolution over signals and an epilogue."""
    x = signal(draft)
    h = convolution(draft, x, draft.size("O", sizes.CHANNELS), draft.choose(1, 3, 5, 7), stride=draft.choose(1, 1, 2))
    return _epilogue(draft, h)


@family()
def conv2d(draft: Draft) -> Outputs:
    """A convolution over images and an epilogue."""
    x = image(draft)
    h = convolution(draft, x, draft.size("O", sizes.CHANNELS), draft.choose(1, 3, 3, 5), stride=draft.choose(1, 1, 2))
    h = _epilogue(draft, h)
    return global_pooled(draft, h) if draft.chance(0.2) else h


@family()
def pointwise_conv(draft: Draft) -> Outputs:
    """A 1x1 convolution, its activation, and a residual or a gate."""
    x = draft.keep(image(draft))
    out = draft.choose("C", draft.size("O", sizes.CHANNELS))
    h = activation(draft, convolution(draft, x, out, 1), ("silu", "relu", "sigmoid", "gelu", "hardswish"))
    if out == "C":
        return draft.then(h, draft.choose(f"{x} + {h}", f"{x} * {h}", f"{h} - {x}"))
    return scaled(draft, h)


@family()
def depthwise_conv(draft: Draft) -> Outputs:
    """A depthwise convolution with normalisation, activation or a pointwise one after it."""
    x = draft.choose(image, image, signal)(draft)
    h = convolution(draft, x, x.dims[1], draft.choose(3, 5, 7), "dwconv", depthwise=True)
    kind = draft.choose("norm", "pointwise", "activation", "gate")
    if kind == "norm":
        h = image_norm(draft, h)
    elif kind == "pointwise":
        h = convolution(draft, activation(draft, h), draft.size("O", sizes.CHANNELS), 1, "pwconv")
    elif kind == "gate":
        gate = draft.input("gate", *x.dims)
        return draft.then(h, f"{h} * torch.sigmoid({gate})")
    return activation(draft, h)


@family("module")
def transposed_conv(draft: Draft) -> Outputs:
    """A transposed convolution that doubles an image, and an epilogue."""
    x = image(draft)
    out = draft.constructed(draft.size("O", sizes.CHANNELS))
    kernel = draft.choose("2, stride=2", "4, stride=2, padding=1", "3, stride=2, padding=1, output_padding=1")
    layer = draft.layer("up", f"nn.ConvTranspose2d({draft.constructed('C')}, {out}, {kernel})")
    h = draft.then(x, f"{layer}({x})", dims=("B", "O", UNKNOWN, UNKNOWN))
    if draft.chance(0.5):
        h = batch_norm(draft, h)
    return scaled(draft, activation(draft, h))


@family()
def causal_conv(draft: Draft) -> Outputs:
    """A causal depthwise convolution of short kernels, as state space models have it."""
    x = draft.keep(signal(draft))
    width = draft.choose(3, 4)
    padded = draft.let("padded", f"F.pad({x}, ({width - 1}, 0))", x)
    weight, bias = draft.parameter("weight", "C", "1", str(width), initial="torch.randn"), draft.parameter("bias", "C")
    if draft.chance(0.5):
        h = draft.let("h", f"F.conv1d({padded}, {weight}, {bias}, groups={x}.shape[1])", x)
    else:
        h = draft.let("h", f"{x} * {weight}[:, :, {width - 1}] + {bias}[:, None]", x)
        for place in range(width - 1):
            h = draft.let("h", f"{h} + {padded}[..., {place}:{place - width + 1}] * {weight}[:, :, {place}]", x)
    h = activation(draft, h, ("silu", "gelu", "relu"))
    return draft.then(h, f"{x} + {h}") if draft.chance(0.4) else h


@family("function")
def pooling(draft: Draft) -> Outputs:
    """Local pooling before or after elementwise operations."""
    x = draft.choose(image, image, signal)(draft)
    if draft.chance(0.5):
        x = draft.apply(x, activation, scaled)
    h = pooled(draft, x)
    kind = draft.choose("epilogue", "global", "difference", "plain")
    if kind == "epilogue":
        return _epilogue(draft, h)
    if kind == "global":
        return global_pooled(draft, h)
    if kind == "difference" and x.rank == 4:
        return draft.then(h, f"{h} - {h}.mean(dim=1, keepdim=True)") if h.text.isidentifier() else h
    return h


@family()
def global_pooling(draft: Draft) -> Outputs:
    """Statistics of each channel after activations, as classifiers begin."""
    x = draft.choose(image, image, signal)(draft)
    for _ in range(draft.choose(0, 1, 2)):
        x = draft.apply(x, activation, scaled)
    if draft.chance(0.3):
        x = draft.keep(x, "h")
        dims = "(2, 3)" if x.rank == 4 else "2"
        return draft.let(
            "out", f"torch.cat([{x}.mean(dim={dims}), {x}.std(dim={dims}), {x}.amax(dim={dims})], dim=1)", x
        )
    if draft.chance(0.3):
        power = draft.number("p", 3.0)
        dims = "(2, 3)" if x.rank == 4 else "2"
        return draft.then(x, f"{x}.clamp(min=1e-6).pow({power}).mean(dim={dims}).pow(1.0 / {power})")
    return scaled(draft, global_pooled(draft, x))


@family("function")
def resize(draft: Draft) -> Outputs:
    """Nearest upsampling, pixel shuffles and patches."""
    x = draft.keep(image(draft))
    kind = draft.choose("nearest", "expand", "shuffle", "patches", "window")
    if kind == "nearest":
        h = draft.let("h", f'F.interpolate({x}, scale_factor=2, mode="nearest")', x)
    elif kind == "expand":
        h = draft.let("h", f"{x}[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2).flatten(4).flatten(2, 3)", x)
    elif kind == "shuffle":
        x = draft.input("packed", "B", "4*C", "H", "W")
        draft.arguments.pop("x", None)
        h = draft.let("h", f"F.pixel_shuffle({x}, 2)", x)
    else:
        draft.arguments.pop("x", None)
        side = draft.choose("2", "4", "7")
        x = draft.input("features", "B", f"{side}*H", f"{side}*W", "C")
        b = draft.unpack(("b", "h", "w", "c"), f"{x}.shape", x, ())
        view = f"{x}.view({b[0].text}, {b[1].text} // {side}, {side}, {b[2].text} // {side}, {side}, {b[3].text})"
        h = draft.let("windows", f"{view}.permute(0, 1, 3, 2, 4, 5).reshape(-1, {side} * {side}, {b[3].text})", x)
    return _epilogue(draft, h)
