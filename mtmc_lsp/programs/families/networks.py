"""Small networks of several blocks."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.families.inputs import signal
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.convolutions import convolution, global_pooled, pooled
from mtmc_lsp.programs.pieces.elementwise import activation
from mtmc_lsp.programs.pieces.norms import image_norm, layer_norm
from mtmc_lsp.programs.pieces.products import linear

NARROW = (16, 24, 32, 48, 64)


def _picture(draft: Draft) -> Tensor:
    draft.size("B", (1, 4, 8, 16, 32))
    side = draft.choose(32, 64, 96, 128, 160)
    return draft.keep(draft.input("x", "B", draft.choose("1", "3"), str(side), str(side)))


@family("module")
def small_classifier(draft: Draft) -> Outputs:
    """Convolutions with pooling and a linear head."""
    h = _picture(draft)
    for number, name in enumerate(("C", "O", "F")[: draft.choose(2, 3)], 1):
        h = convolution(draft, h, draft.size(name, NARROW), 3, f"conv{number}", stride=draft.choose(1, 2))
        if draft.chance(0.6):
            h = image_norm(draft, h, f"norm{number}")
        h = activation(draft, h)
        if draft.chance(0.3):
            h = pooled(draft, h)
    h = global_pooled(draft, h)
    return linear(draft, h, draft.size("V", sizes.CLASSES), "head")


@family("module")
def small_unet(draft: Draft) -> Outputs:
    """One level of a U-Net: down, middle, up, and the joined skip."""
    x = _picture(draft)
    c, wide = draft.size("C", NARROW), draft.size("O", (32, 64, 96))
    h = draft.keep(activation(draft, convolution(draft, x, c, 3, "enc")), "skip")
    d = draft.let("down", draft.choose(f"F.max_pool2d({h}, 2)", f"F.avg_pool2d({h}, 2)"), h)
    for number in range(1, draft.choose(2, 3)):
        d = activation(draft, image_norm(draft, convolution(draft, d, wide, 3, f"mid{number}")))
    if draft.chance(0.5):
        u = draft.let("up", f'F.interpolate({d}, scale_factor=2, mode="nearest")', d)
    else:
        layer = draft.layer(
            "upconv", f"nn.ConvTranspose2d({draft.constructed(d.dims[1])}, {draft.constructed(wide)}, 2, stride=2)"
        )
        u = draft.let("up", f"{layer}({d})", d)
    if draft.chance(0.6):
        joined = draft.layer(
            "dec",
            f"nn.Conv2d({draft.constructed(c)} + {draft.constructed(wide)}, {draft.constructed(c)}, 3, padding=1)",
        )
        y = draft.let("y", f"{joined}(torch.cat([{u}, {h}], dim=1))", h)
    else:
        y = draft.let("y", f"{convolution(draft, u, c, 1, 'reduce')} + {h}", h)
    return convolution(draft, activation(draft, y), draft.choose("1", "2", "3"), 1, "out")


@family("module")
def autoencoder(draft: Draft) -> Outputs:
    """Linear encoders and decoders, also with a sampled code."""
    draft.dtype = "f32"
    x = draft.keep(draft.input("x", draft.size("N", sizes.ROWS[:8]), draft.size("D", (64, 128, 256, 512, 784, 1000))))
    hidden, code = draft.size("I", (128, 256, 400, 512)), draft.size("R", (8, 16, 20, 32, 64))
    h = activation(draft, linear(draft, x, hidden, "enc"), ("relu", "elu", "tanh", "silu"))
    kind = draft.choose("plain", "sampled", "sparse", "denoising")
    if kind == "sampled":
        both = linear(draft, h, f"2*{code}", "stats", to="stats")
        mean, logvar = draft.unpack(("mean", "logvar"), f"{both}.chunk(2, dim=-1)", both, ("N", code))
        z = draft.let("z", f"{mean} + torch.exp(0.5 * {logvar}) * {draft.input('noise', 'N', code)}", mean)
    else:
        z = linear(draft, h, code, "code", to="z")
        z = activation(draft, z, ("relu", "tanh")) if kind == "sparse" else z
    out = linear(
        draft,
        activation(draft, linear(draft, z, hidden, "dec"), ("relu", "elu", "tanh", "silu")),
        "D",
        "out",
        to="recon",
    )
    if kind == "denoising":
        return draft.let("loss", f"(torch.sigmoid({out}) - {x}).square().mean()", out)
    if kind == "sampled":
        kl = draft.let("kl", f"-0.5 * (1.0 + {logvar} - {mean}.square() - {logvar}.exp()).sum(dim=-1)", mean)
        return draft.let("loss", f"(({out} - {x}).square().sum(dim=-1) + {kl}).mean()", out)
    return out


@family("module")
def sequence_model(draft: Draft) -> Outputs:
    """Dilated or gated convolutions over signals with residuals."""
    x = draft.keep(signal(draft))
    h = x
    for number in range(1, draft.choose(2, 3)):
        kind = draft.choose("gated", "plain", "separable")
        base = draft.keep(h)
        if kind == "gated":
            both = convolution(draft, base, "2*C", 3, f"conv{number}", to="both")
            a, b = draft.unpack(("a", "b"), f"{both}.chunk(2, dim=1)", both, x.dims)
            h = draft.let("g", draft.choose(f"torch.tanh({a}) * torch.sigmoid({b})", f"{a} * torch.sigmoid({b})"), a)
        elif kind == "plain":
            h = activation(
                draft,
                convolution(draft, base, "C", draft.choose(3, 5), f"conv{number}"),
                ("relu", "elu", "leaky_relu", "gelu"),
            )
        else:
            h = convolution(draft, base, "C", draft.choose(5, 7), f"dw{number}", depthwise=True)
            h = activation(draft, convolution(draft, h, "C", 1, f"pw{number}"), ("silu", "gelu", "relu"))
        h = draft.let("res", f"{base} + {h}", x)
    end = draft.choose("plain", "pool", "project")
    if end == "pool":
        return global_pooled(draft, h)
    return h if end == "plain" else convolution(draft, h, draft.size("O", sizes.CHANNELS), 1, "out")


@family("module")
def deep_set(draft: Draft) -> Outputs:
    """Shared MLPs on the points of a set, pooled, and a head."""
    b, n = draft.size("B", (4, 8, 16, 32)), draft.size("N", (128, 256, 1000, 1024))
    h = draft.input("points", b, n, draft.choose("3", "6", "9"))
    for number, name in enumerate(("I", "F")[: draft.choose(1, 2)], 1):
        h = activation(draft, linear(draft, h, draft.size(name, (64, 96, 128, 256)), f"local{number}"))
        if draft.chance(0.4):
            h = layer_norm(draft, h, f"norm{number}")
    h = draft.then(
        h, draft.choose(f"{h}.amax(dim=1)", f"{h}.mean(dim=1)", f"{h}.sum(dim=1)"), "pooled", dims=(b, h.dims[-1])
    )
    h = activation(draft, linear(draft, h, draft.size("K", (64, 128, 256)), "merge"))
    return linear(draft, h, draft.size("V", sizes.CLASSES), "head")


@family("module")
def neural_field(draft: Draft) -> Outputs:
    """Coordinates with frequencies through an MLP with sines or ReLU."""
    draft.dtype = draft.choose("f32", "f32", "f16")
    x = draft.keep(draft.input("coords", draft.size("N", sizes.ROWS), draft.choose("2", "3")))
    kind = draft.choose("sine", "fourier", "gauss")
    h: Tensor = x
    if kind != "sine":
        width = draft.size("F", (64, 128, 256))
        h = linear(draft, x, width, "freqs", bias=False, to="f")
        h = draft.let("enc", f"torch.cat([torch.sin({h}), torch.cos({h})], dim=-1)", h, dims=("N", f"2*{width}"))
    for number in range(1, draft.choose(2, 3, 4)):
        h = linear(draft, h, draft.size("I", (64, 128, 256)), f"fc{number}", to=f"h{number}")
        if kind == "sine":
            h = draft.then(h, f"torch.sin(30.0 * {h})")
        elif kind == "gauss":
            h = draft.then(h, f"torch.exp(-0.5 * {h}.square())")
        else:
            h = activation(draft, h, ("relu", "silu", "softplus"))
    out = linear(draft, h, draft.choose("1", "3", "4"), "out")
    return draft.then(out, f"torch.sigmoid({out})") if draft.chance(0.5) else out
