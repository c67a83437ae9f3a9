"""Boxes, points, images and signals."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft
from mtmc_lsp.programs.families.inputs import image
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.elementwise import activation, scaled, unary


@family("function")
def boxes(draft: Draft) -> Outputs:
    """Boxes of detectors: decoded, converted, compared row by row, clipped."""
    draft.dtype = "f32"
    n = draft.size("N", (1000, 8400, 20000, 100000))
    a = draft.keep(draft.input("boxes", n, "4", values="0..512"))
    kind = draft.choose("decode", "encode", "centers", "generalised", "distance", "area", "scale")
    if kind in ("decode", "encode", "generalised", "distance"):
        b = draft.keep(
            draft.input(
                {"decode": "deltas", "encode": "gt"}.get(kind, "other"),
                n,
                "4",
                **({} if kind == "decode" else {"values": "0..512"}),
            )
        )
    size = draft.let("size", f"{a}[:, 2:] - {a}[:, :2]", a)
    if kind == "decode":
        center = draft.let("center", f"{a}[:, :2] + 0.5 * {size} + {b}[:, :2] * {size}", a)
        half = draft.let("half", f"0.5 * {size} * torch.exp({b}[:, 2:].clamp(max=4.135))", a)
        return draft.let("out", f"torch.cat([{center} - {half}, {center} + {half}], dim=-1)", a)
    if kind == "encode":
        other = draft.let("other_size", f"{b}[:, 2:] - {b}[:, :2]", b)
        place = draft.let(
            "place", f"({b}[:, :2] - {a}[:, :2] + 0.5 * ({other} - {size})) / {size}.abs().clamp(min=1e-3)", b
        )
        ratio = f"torch.log({other}.abs().clamp(min=1e-3) / {size}.abs().clamp(min=1e-3))"
        return draft.let("out", f"torch.cat([{place}, {ratio}], dim=-1)", b)
    if kind in ("generalised", "distance"):
        low, high = (
            draft.let("low", f"torch.maximum({a}[:, :2], {b}[:, :2])", a),
            draft.let("high", f"torch.minimum({a}[:, 2:], {b}[:, 2:])", a),
        )
        inside = draft.let("inside", f"({high} - {low}).clamp(min=0.0).prod(dim=-1)", a)
        union = draft.let("union", f"{size}.prod(dim=-1) + ({b}[:, 2:] - {b}[:, :2]).prod(dim=-1) - {inside}", a)
        iou = draft.let("iou", f"{inside} / ({union} + 1e-7)", a)
        if kind == "generalised":
            hull = draft.let(
                "hull",
                f"(torch.maximum({a}[:, 2:], {b}[:, 2:]) - torch.minimum({a}[:, :2], {b}[:, :2])).prod(dim=-1)",
                a,
            )
            return draft.let("loss", f"1.0 - {iou} + ({hull} - {union}) / ({hull} + 1e-7)", a)
        apart = draft.let("apart", f"({a}[:, :2] + {a}[:, 2:] - {b}[:, :2] - {b}[:, 2:]).square().sum(dim=-1) / 4.0", a)
        return draft.let("loss", f"1.0 - {iou} + {apart} / {draft.number('diagonal', 262144.0)}", a)
    if kind == "centers":
        return draft.let("out", f"torch.cat([{a}[:, :2] + 0.5 * {size}, {size}], dim=-1)", a)
    if kind == "area":
        return draft.let("out", f"torch.sqrt({size}[:, 0].clamp(min=0.0) * {size}[:, 1].clamp(min=0.0))", a)
    return draft.let(
        "out",
        f"torch.cat([{a}[:, :2] - 0.1 * {size}, {a}[:, 2:] + 0.1 * {size}], dim=-1).clamp(0.0, {draft.number('limit', 512.0)})",
        a,
    )


@family("function")
def points(draft: Draft) -> Outputs:
    """Points in space: transforms, projections, rotations, distances."""
    draft.dtype = "f32"
    b, n = draft.size("B", (1, 4, 16, 32)), draft.size("N", (1024, 2048, 4000, 10000))
    p = draft.keep(draft.input("points", b, n, "3"))
    kind = draft.choose("rigid", "project", "normalise", "chamfer", "quaternion", "spherical", "centroid")
    if kind == "rigid":
        r, t = draft.input("rotation", b, "3", "3"), draft.input("translation", b, "3")
        return draft.let(
            "out",
            draft.choose(f"{p} @ {r}.transpose(1, 2) + {t}.unsqueeze(1)", f"torch.baddbmm({t}.unsqueeze(1), {p}, {r})"),
            p,
        )
    if kind == "project":
        focal = draft.input("focal", b, "2", values="100..500")
        z = draft.let("z", f"{p}[..., 2:].abs().clamp(min=1e-2)", p)
        return draft.let("uv", f"{p}[..., :2] / {z} * {focal}.unsqueeze(1) + 112.0", p)
    if kind == "normalise":
        c = draft.let("centered", f"{p} - {p}.mean(dim=1, keepdim=True)", p)
        return draft.let("out", f"{c} / {c}.norm(dim=-1).amax(dim=1)[:, None, None].clamp(min=1e-6)", p)
    if kind == "chamfer":
        draft.sizes["N"] = draft.choose(256, 512, 1024)
        q = draft.input("other", b, n, "3")
        d = draft.let("d", f"({p}.unsqueeze(2) - {q}.unsqueeze(1)).square().sum(dim=-1)", p)
        return draft.let("loss", f"{d}.amin(dim=1).mean() + {d}.amin(dim=2).mean()", p)
    if kind == "quaternion":
        q = draft.input("q", b, "1", "4")
        w, v = draft.let("w", f"{q}[..., :1]", q), draft.let("v", f"{q}[..., 1:].expand_as({p})", q)
        t = draft.let("t", f"2.0 * torch.cross({v}, {p}, dim=-1)", p)
        return draft.let("out", f"{p} + {w} * {t} + torch.cross({v}, {t}, dim=-1)", p)
    if kind == "spherical":
        r = draft.let("r", f"{p}.norm(dim=-1)", p)
        angles = f"torch.atan2({p}[..., 1], {p}[..., 0]), torch.acos(({p}[..., 2] / {r}.clamp(min=1e-6)).clamp(-0.999, 0.999))"
        return draft.let("out", f"torch.stack([{r}, {angles}], dim=-1)", p)
    w = draft.input("mass", b, n, values="0..1")
    center = draft.let(
        "center", f"({p} * {w}.unsqueeze(-1)).sum(dim=1) / {w}.sum(dim=1, keepdim=True).clamp(min=1e-6)", p
    )
    return draft.let("out", f"(({p} - {center}.unsqueeze(1)).square().sum(dim=-1) * {w}).sum(dim=1)", p)


@family("function")
def image_filter(draft: Draft) -> Outputs:
    """Derivatives, blurs, edges and smoothness of images."""
    draft.dtype = draft.choose("f32", "f32", "f16")
    x = draft.keep(image(draft))
    kind = draft.choose("gradient", "variation", "laplace", "box", "unsharp", "edges", "window")
    if kind in ("gradient", "variation"):
        right, down = (
            draft.let("dx", f"{x}[..., :, 1:] - {x}[..., :, :-1]", x),
            draft.let("dy", f"{x}[..., 1:, :] - {x}[..., :-1, :]", x),
        )
        if kind == "variation":
            return draft.let(
                "loss",
                f"{right}.{draft.choose('abs', 'square')}().mean() + {down}.{draft.choose('abs', 'square')}().mean()",
                x,
            )
        return unary(
            draft,
            draft.let("size", f"torch.sqrt({right}[..., :-1, :].square() + {down}[..., :, :-1].square() + 1e-6)", x),
        )
    if kind == "laplace":
        inner = f"{x}[..., 1:-1, 1:-1]"
        around = f"{x}[..., :-2, 1:-1] + {x}[..., 2:, 1:-1] + {x}[..., 1:-1, :-2] + {x}[..., 1:-1, 2:]"
        return scaled(draft, draft.let("out", f"{around} - 4.0 * {inner}", x))
    blurred = draft.let(
        "blurred", f"F.avg_pool2d({x}, {draft.choose('3, stride=1, padding=1', '5, stride=1, padding=2')})", x
    )
    if kind == "box":
        return activation(draft, blurred)
    if kind == "unsharp":
        return draft.let("sharp", f"({x} + {draft.number('amount', 0.6)} * ({x} - {blurred})).clamp(0.0, 1.0)", x)
    if kind == "edges":
        return draft.let("edges", f"({x} - {blurred}).abs().mean(dim=1)", x)
    squares = draft.let("squares", f"F.avg_pool2d({x} * {x}, 3, stride=1, padding=1)", x)
    return draft.let(
        "out",
        f"({x} - {blurred}) * torch.rsqrt(({squares} - {blurred}.square()).clamp(min=0.0) + 1e-4)",
        x,
    )


@family("function")
def audio(draft: Draft) -> Outputs:
    """Windows, levels and spectra of signals."""
    draft.dtype = "f32"
    b, n = draft.size("B", sizes.BATCH), draft.size("L", (16000, 22050, 32000, 48000))
    x = draft.keep(draft.input("wave", b, n))
    kind = draft.choose("emphasis", "compress", "loudness", "frames", "mel", "mask", "normalise", "fade")
    if kind == "emphasis":
        h = draft.let("h", f"{x}[:, 1:] - {draft.number('coefficient', 0.97)} * {x}[:, :-1]", x)
        return scaled(draft, h)
    if kind == "compress":
        mu = draft.number("mu", 255.0)
        return draft.let(
            "out",
            f"torch.sign({x}) * torch.log1p({mu} * {x}.abs().clamp(max=1.0)) / {draft.choose('5.545177', '4.859812')}",
            x,
        )
    if kind == "loudness":
        return draft.let("out", f"10.0 * torch.log10({x}.square().mean(dim=-1) + 1e-10)", x)
    if kind == "frames":
        window = draft.input("window", "400", values="0..1")
        frames = draft.let("frames", f"{x}.unfold(-1, 400, 160) * {window}", x)
        return draft.let(
            "energy",
            draft.choose(f"torch.log({frames}.square().sum(dim=-1) + 1e-6)", f"{frames}.abs().amax(dim=-1)"),
            x,
        )
    if kind in ("mel", "mask"):
        draft.arguments.pop("wave")
        t, f = draft.size("T", (100, 500, 1000, 3000)), draft.size("F", (201, 257, 513))
        s = draft.keep(draft.input("power", b, f, t, values="0..4"))
        if kind == "mask":
            m = draft.input("mask", b, f, t)
            return draft.let("out", f"torch.sqrt({s} + 1e-8) * torch.sigmoid({m})", s)
        bank = draft.input("filters", draft.choose("64", "80", "128"), f, values="0..1")
        mel = draft.let("mel", f"torch.log10(({bank} @ {s}).clamp(min=1e-10))", s)
        return draft.then(
            mel,
            draft.choose(
                f"(torch.maximum({mel}, {mel}.amax() - 8.0) + 4.0) / 4.0", f"{mel} - {mel}.mean(dim=-1, keepdim=True)"
            ),
        )
    if kind == "fade":
        ramp = draft.let("ramp", f"torch.arange({x}.shape[-1], device={x}.device) / {x}.shape[-1]", x)
        return draft.let("out", f"{x} * (0.5 - 0.5 * torch.cos(3.14159265 * {ramp}))", x)
    c = draft.let("c", f"{x} - {x}.mean(dim=-1, keepdim=True)", x)
    return draft.let("out", f"{c} / torch.sqrt({c}.square().mean(dim=-1, keepdim=True) + 1e-7)", x)
