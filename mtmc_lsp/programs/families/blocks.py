"""Blocks of networks for images and tokens."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.families.inputs import image, tokens
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.convolutions import convolution, pooled
from mtmc_lsp.programs.pieces.elementwise import activation, dropout
from mtmc_lsp.programs.pieces.norms import batch_norm, group_norm, image_norm, token_norm
from mtmc_lsp.programs.pieces.products import attention, linear, merged_heads, split_heads


@family()
def conv_norm_act(draft: Draft) -> Outputs:
    """Convolution, normalisation and activation, once or twice, in either order."""
    h = image(draft)
    for number in range(1, draft.choose(2, 2, 3)):
        out = draft.size("O" if number == 1 else "O2", sizes.CHANNELS)
        if draft.chance(0.3):
            h = convolution(
                draft, activation(draft, image_norm(draft, h)), out, draft.choose(1, 3), f"conv{number}", bias=False
            )
        else:
            h = image_norm(draft, convolution(draft, h, out, draft.choose(1, 3, 3, 5), f"conv{number}", bias=False))
            h = activation(draft, h)
    return pooled(draft, h) if draft.chance(0.25) else h


@family("module")
def residual_conv_block(draft: Draft) -> Outputs:
    """Residual blocks of two or three convolutions."""
    x = draft.keep(image(draft))
    is_bottleneck = draft.chance(0.4)
    middle = draft.size("I", (16, 32, 64, 128)) if is_bottleneck else "C"
    pre = draft.chance(0.3)
    kinds = (1, 3, 1) if is_bottleneck else (3, 3)
    h = x
    for number, kernel in enumerate(kinds, 1):
        out = "C" if number == len(kinds) else middle
        if pre:
            h = activation(draft, image_norm(draft, h, f"norm{number}"))
        h = convolution(draft, h, out, kernel, f"conv{number}", bias=pre)
        if not pre:
            h = image_norm(draft, h, f"norm{number}")
            h = activation(draft, h) if number < len(kinds) else h
    if draft.chance(0.3):
        s = draft.let("s", f"torch.sigmoid({h}.mean(dim=(2, 3), keepdim=True))", h)
        h = draft.let("scaled", f"{h} * {s}", h)
    h = draft.then(h, draft.choose(f"{h} + {x}", f"{x} + {draft.choose('0.1', '0.5')} * {h}"))
    return h if pre else activation(draft, h)


@family("module")
def inverted_residual(draft: Draft) -> Outputs:
    """Expansion, depthwise convolution and projection, as mobile networks have them."""
    x = draft.keep(image(draft))
    ratio = draft.choose(2, 4, 6)
    h = activation(
        draft,
        batch_norm(draft, convolution(draft, x, f"{ratio}*C", 1, "expand", bias=False)),
        ("relu6", "silu", "hardswish"),
    )
    h = convolution(draft, h, f"{ratio}*C", draft.choose(3, 5), "depthwise", depthwise=True, bias=False)
    h = activation(draft, batch_norm(draft, h), ("relu6", "silu", "hardswish"))
    if draft.chance(0.4):
        h = draft.keep(h)
        gate = draft.let("gate", f"{h}.mean(dim=(2, 3), keepdim=True)", h, dims=(*h.dims[:2], "1", "1"))
        gate = convolution(draft, gate, h.dims[1], 1, "se", to="g")
        h = draft.let("excited", f"{h} * torch.sigmoid({gate})", h)
    h = batch_norm(draft, convolution(draft, h, "C", 1, "project", bias=False))
    return draft.then(h, f"{x} + {h}")


@family("module")
def diffusion_block(draft: Draft) -> Outputs:
    """Residual blocks with GroupNorm, SiLU and an embedding of the time."""
    x = draft.keep(image(draft))
    emb = draft.input("temb", "B", draft.size("E", (256, 512, 1024, 1280)))
    out = draft.choose("C", draft.size("O", sizes.CHANNELS))
    h = convolution(draft, activation(draft, group_norm(draft, x, "norm1"), ("silu", "silu", "gelu")), out, 3, "conv1")
    style = draft.choose("add", "scale_shift", "gate")
    e = linear(
        draft, activation(draft, emb, ("silu",), "e"), f"2*{out}" if style == "scale_shift" else out, "emb_proj", to="t"
    )
    if style == "scale_shift":
        scale, shift = draft.unpack(
            ("scale", "shift"), f"{e}[:, :, None, None].chunk(2, dim=1)", e, ("B", out, "1", "1")
        )
        h = group_norm(draft, h, "norm2")
        h = draft.then(h, f"{h} * (1.0 + {scale}) + {shift}")
    else:
        h = draft.then(
            h, f"{h} + {e}[:, :, None, None]" if style == "add" else f"{h} * torch.sigmoid({e})[:, :, None, None]"
        )
        h = group_norm(draft, h, "norm2")
    h = activation(draft, h, ("silu", "silu", "mish"))
    h = convolution(draft, dropout(draft, h) if draft.chance(0.4) else h, out, 3, "conv2")
    skip = x if out == "C" else convolution(draft, x, out, 1, "skip", to="skip_x")
    return draft.then(h, draft.choose(f"{skip} + {h}", f"({skip} + {h}) * 0.7071"))


@family("module")
def transformer_block(draft: Draft) -> Outputs:
    """Attention and an MLP with residuals, pre-norm, post-norm or parallel."""
    draft.size("B", (1, 2, 4))
    draft.size("S", sizes.SEQUENCE[:10])
    count = draft.choose(4, 6, 8, 12)
    draft.sizes["D"] = count * draft.choose(32, 64, 64, 96)
    x = draft.keep(draft.input("x", "B", "S", "D"))
    order = draft.choose("pre", "pre", "post", "parallel")
    number = draft.setting("heads", count)
    h = draft.keep(token_norm(draft, x, "norm1")) if order != "post" else x
    qkv = linear(draft, h, "3*D", "qkv", to="qkv")
    parts = draft.unpack(("q", "k", "v"), f"{qkv}.chunk(3, dim=-1)", qkv, x.dims)
    q, k, v = (split_heads(draft, part, number, f"{name}h") for part, name in zip(parts, ("q", "k", "v"), strict=True))
    out = attention(draft, q, k, v, draft.choose("", "causal"))
    out = linear(draft, merged_heads(draft, out, "D"), "D", "proj", to="attn_out")
    if order == "parallel":
        branch = h
        middle = draft.let("x_attn", f"{x} + {out}", x)
    else:
        middle = draft.let("x_attn", f"{x} + {out}", x)
        middle = draft.keep(token_norm(draft, middle, "norm1") if order == "post" else middle)
        branch = token_norm(draft, middle, "norm2") if order == "pre" else middle
    m = _mlp(draft, draft.keep(branch))
    result = draft.let("out", f"{middle} + {m}", middle)
    return token_norm(draft, result, "norm2") if order == "post" else result


def _mlp(draft: Draft, h: Tensor) -> Tensor:
    if draft.chance(0.5):
        m = activation(draft, linear(draft, h, "4*D", "fc1", to="m"), ("gelu", "gelu_tanh", "relu", "squared_relu"))
        return linear(draft, m, "D", "fc2", to="mlp_out")
    gate, up = (
        linear(draft, h, "2*D", "gate", bias=False, to="gate"),
        linear(draft, h, "2*D", "up", bias=False, to="up"),
    )
    m = draft.let("m", f"{activation(draft, gate, ('silu', 'gelu'))} * {up}", up)
    return linear(draft, m, "D", "down", bias=False, to="mlp_out")


@family("module")
def mixer_block(draft: Draft) -> Outputs:
    """Mixing of tokens and of channels by linear layers."""
    x = draft.keep(tokens(draft, "x"))
    draft.sizes["D"], draft.sizes["S"] = draft.choose(128, 256, 384, 512, 768), draft.choose(64, 98, 128, 196, 256)
    kind = draft.choose("mlp", "gate", "pool", "fourier_free")
    h = token_norm(draft, x, "norm1")
    if kind == "pool":
        h = draft.keep(h)
        pool = draft.let("pool", f"F.avg_pool1d({h}.transpose(1, 2), 3, stride=1, padding=1).transpose(1, 2)", h)
        h = draft.let("mixed", f"{pool} - {h}", h)
    else:
        h = draft.let("t", f"{h}.transpose(1, 2)", h, dims=("B", "D", "S"))
        if kind == "mlp":
            h = activation(draft, linear(draft, h, draft.size("I", (64, 128, 256)), "token1", to="u"), ("gelu", "silu"))
        h = linear(draft, h, "S", "token2", to="w")
        h = draft.let("mixed", f"{h}.transpose(1, 2)", h, dims=x.dims)
        if kind == "gate":
            h = draft.let("gated", f"{x} * {h}", h)
    y = draft.let("y", f"{x} + {h}", x)
    if kind == "gate":
        return linear(draft, y, "D", "channel")
    z = activation(
        draft, linear(draft, token_norm(draft, y, "norm2"), "2*D", "channel1", to="z"), ("gelu", "relu", "silu")
    )
    z = linear(draft, z, "D", "channel2", to="o")
    if kind == "mlp":
        # Without layer scale it would be the mixer of every package.
        z = draft.let("scaled", f"{z} * {draft.parameter('gamma', 'D')}", z)
    return draft.let("out", f"{y} + {z}", y)


@family("module")
def large_kernel_block(draft: Draft) -> Outputs:
    """Depthwise convolution, channels last LayerNorm and an inverted bottleneck."""
    x = draft.keep(image(draft))
    h = convolution(draft, x, "C", draft.choose(5, 7, 9), "dwconv", depthwise=True)
    h = draft.let("t", f"{h}.permute(0, 2, 3, 1)", h, dims=("B", "H", "W", "C"))
    h = token_norm(draft, h)
    h = activation(draft, linear(draft, h, f"{draft.choose(2, 3, 4)}*C", "pwconv1"), ("gelu", "gelu", "relu", "silu"))
    if draft.chance(0.3):
        h = draft.keep(h)
        size = draft.let("g", f"{h}.norm(dim=(1, 2), keepdim=True)", h)
        h = draft.let("responded", f"{h} * ({size} / ({size}.mean(dim=-1, keepdim=True) + 1e-6)) + {h}", h)
    h = linear(draft, h, "C", "pwconv2")
    if draft.chance(0.6):
        h = draft.then(h, f"{h} * {draft.parameter('gamma', 'C')}")
    h = draft.let("back", f"{h}.permute(0, 3, 1, 2)", h, dims=x.dims)
    return draft.let("out", f"{x} + {h}", x)


@family("module")
def spatial_attention(draft: Draft) -> Outputs:
    """Gates for places of an image, and gated skips of decoders."""
    x = draft.keep(image(draft))
    kind = draft.choose("statistics", "skip", "context", "local")
    if kind == "statistics":
        s = draft.let(
            "s",
            f"torch.cat([{x}.mean(dim=1, keepdim=True), {x}.amax(dim=1, keepdim=True)], dim=1)",
            x,
            dims=("B", "2", "H", "W"),
        )
        a = convolution(draft, s, "1", draft.choose(3, 7), "conv", to="a")
    elif kind == "skip":
        g = draft.input("g", "B", draft.size("O", sizes.CHANNELS), "H", "W")
        inner = draft.size("I", (16, 32, 64))
        u, v = convolution(draft, x, inner, 1, "theta", to="u"), convolution(draft, g, inner, 1, "phi", to="v")
        a = convolution(
            draft, activation(draft, draft.let("w", f"{u} + {v}", u), ("relu", "silu", "gelu")), "1", 1, "psi", to="a"
        )
    elif kind == "context":
        a = convolution(draft, x, "1", 1, "mask", to="m")
        weights = draft.let("weights", f"torch.softmax({a}.flatten(2), dim=-1)", a)
        c = draft.let("context", f"{x}.flatten(2) @ {weights}.transpose(1, 2)", x, dims=("B", "C", "1"))
        return draft.let("out", f"{x} + {c}.unsqueeze(-1)", x)
    else:
        a = convolution(draft, x, "C", draft.choose(3, 5), "local", depthwise=True, to="a")
    gate = draft.let(
        "gate", draft.choose(f"torch.sigmoid({a})", f"F.hardsigmoid({a})", f"0.5 * (torch.tanh({a}) + 1.0)"), a
    )
    return draft.let("out", draft.choose(f"{x} * {gate}", f"{x} + {x} * {gate}"), x)


@family("module")
def feed_forward_block(draft: Draft) -> Outputs:
    """A normalised MLP with residual, of half weight or gated, in several orders."""
    x = draft.keep(tokens(draft))
    draft.sizes["D"] = draft.choose(*sizes.WIDTH[:14])
    kind = draft.choose("half", "scaled", "plain", "double")
    h = token_norm(draft, x)
    h = activation(
        draft,
        linear(draft, h, draft.size("I", (512, 1024, 2048, 3072, 4096)), "fc1"),
        ("gelu", "silu", "relu", "squared_relu", "mish"),
    )
    if draft.chance(0.4):
        h = dropout(draft, h)
    if kind == "double":
        h = token_norm(draft, h, "inner_norm")
    h = linear(draft, h, "D", "fc2", to="branch")
    if kind == "scaled":
        h = draft.let("scaled", f"{h} * {draft.parameter('gamma', 'D')}", h)
    out = draft.let("out", f"{x} + {'0.5 * ' if kind == 'half' else ''}{h}", x)
    return token_norm(draft, out, "final_norm") if draft.chance(0.3) else out
