"""Optimizer steps, quantisation and other pieces of training."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.families.inputs import rows, tokens
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.elementwise import scaled, to_float


def _state(draft: Draft, name: str, *, values: str = "") -> Tensor:
    return draft.keep(draft.input(name, draft.size("N", sizes.PARAMETERS), dtype="f32", values=values))


@family("function")
def optimizer_step(draft: Draft) -> Outputs:
    """An update of flat parameters, in place or with new tensors."""
    draft.dtype = "f32"
    p, g = _state(draft, "param"), _state(draft, "grad")
    lr = draft.choose(1e-3, 3e-4, 0.01, 0.1)
    change = draft.choose("none", "none", "none", "decay", "limit", "clip")
    if change == "decay":
        g = draft.let("g", f"{g} + 0.01 * {p}", g)
    elif change == "limit":
        g = draft.let("g", f"{g}.clamp(-1.0, 1.0)", g)
    elif change == "clip":
        g = draft.let("g", f"{g} * {draft.input('clip', '1', dtype='f32')}", g)
    kind = draft.choose("sgd", "momentum", "nesterov", "rmsprop", "adagrad", "adam", "sign", "amsgrad")
    in_place = draft.chance(0.5)
    if kind == "sgd":
        return _applied(draft, p, f"{g}", lr, in_place)
    m = _state(draft, "momentum")
    beta = draft.choose(0.9, 0.95, 0.99)
    if kind in ("momentum", "nesterov"):
        moved = _moved(draft, m, f"{beta} * {m} + {g}", in_place)
        step = f"({g} + {beta} * {moved})" if kind == "nesterov" else f"{moved}"
        return _applied(draft, p, step, lr, in_place), moved
    if kind == "sign":
        direction = draft.let("direction", f"torch.sign({beta} * {m} + {1 - beta:.2f} * {g})", p)
        return _applied(draft, p, f"{direction}", lr, in_place), _moved(draft, m, f"0.99 * {m} + 0.01 * {g}", in_place)
    v = _state(draft, "second", values="0..1")
    squares = (
        f"{v} + {g} * {g}" if kind == "adagrad" else f"{draft.choose(0.95, 0.99, 0.999)} * {v} + 0.001 * {g}.square()"
    )
    second = _moved(draft, v, squares, in_place)
    below = f"({second}.sqrt() + {draft.choose(1e-8, 1e-6)})"
    if kind in ("rmsprop", "adagrad"):
        draft.arguments.pop(m.text)
        return _applied(draft, p, f"{g} / {below}", lr, in_place), second
    first = _moved(draft, m, f"{beta} * {m} + {1 - beta:.2f} * {g}", in_place)
    if kind == "amsgrad":
        top = draft.let("top", f"torch.maximum({_state(draft, 'highest', values='0..1')}, {second})", p)
        return _applied(draft, p, f"{first} / ({top}.sqrt() + 1e-8)", lr, in_place), first, second, top
    return _applied(draft, p, f"{first} / {below}", lr, in_place), first, second


def _moved(draft: Draft, state: Tensor, text: str, in_place: bool) -> Tensor:
    if in_place:
        draft.lines.append(f"{state}.copy_({text})")
        return state
    return draft.let(f"new_{state.text}", text, state)


def _applied(draft: Draft, p: Tensor, step: str, lr: float, in_place: bool) -> Tensor:
    if in_place:
        draft.lines.append(f"{p}.sub_({lr} * {step})")
        return p
    return draft.let("new_param", f"{p} - {lr} * {step}", p)


@family("function")
def weight_update(draft: Draft) -> Outputs:
    """Averages of weights, masked or clipped gradients, projections of rows."""
    kind = draft.choose("average", "swa", "clip_rows", "mask", "weight_norm", "spectral", "centralize", "merge")
    draft.dtype = "f32"
    a, b = (
        draft.keep(draft.input("a", draft.size("M", sizes.WIDTH), draft.size("K", sizes.WIDTH))),
        draft.keep(draft.input("b", "M", "K")),
    )
    if kind == "average":
        return draft.let("out", f"{draft.number('decay', 0.999)} * {a} + {draft.number('rest', 0.001)} * {b}", a)
    if kind == "swa":
        return draft.let("out", f"{a} + ({b} - {a}) / ({draft.number('count', 8.0)} + 1.0)", a)
    if kind == "merge":
        c = draft.input("c", "M", "K")
        return draft.let("out", f"{a} + 0.4 * ({b} - {a}) + 0.3 * ({c} - {a})", a)
    if kind == "mask":
        return draft.let("out", f"torch.where({b}.abs() > {draft.number('threshold', 0.5)}, {a}, 0.0) * 2.0", a)
    draft.arguments.pop("b")
    norm = draft.let("norm", f"{a}.norm(dim=1, keepdim=True)", a, dims=("M", "1"))
    if kind == "clip_rows":
        return draft.let("out", f"{a} * ({draft.number('limit', 1.0)} / {norm}.clamp(min=1.0))", a)
    if kind == "centralize":
        return draft.let("out", f"({a} - {a}.mean(dim=1, keepdim=True)) / ({norm} + 1e-6)", a)
    g = draft.input("g", "M", "1")
    h = draft.let("w", f"{g} * {a} / {norm}", a)
    if kind == "spectral":
        return scaled(draft, h)
    x = draft.input("x", draft.size("N", sizes.ROWS[:7]), "K")
    return draft.let("out", f"{x} @ {h}.t()", x)


@family("function")
def quantize(draft: Draft) -> Outputs:
    """Quantisation and back, by row, channel, group or tensor."""
    x = draft.keep(draft.choose(rows, tokens)(draft))
    draft.sizes["D"] = draft.choose(*sizes.WIDTH[3:])
    h = draft.keep(to_float(draft, x))
    kind = draft.choose("rows", "affine", "group", "fixed", "ternary", "float8", "log", "binary")
    levels = draft.choose(127.0, 7.0)
    if kind == "rows":
        scale = draft.let("scale", f"{h}.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / {levels}", h)
        return draft.let("out", f"(torch.round({h} / {scale}).clamp(-{levels}, {levels}) * {scale}).to({x}.dtype)", x)
    if kind == "affine":
        low, high = (
            draft.let("low", f"{h}.amin(dim=-1, keepdim=True)", h),
            draft.let("high", f"{h}.amax(dim=-1, keepdim=True)", h),
        )
        scale = draft.let("scale", f"({high} - {low}).clamp(min=1e-6) / 255.0", h)
        q = draft.let("q", f"torch.round(({h} - {low}) / {scale}).clamp(0.0, 255.0).to(torch.uint8)", h)
        return q, scale, low
    if kind == "group":
        width = draft.choose(32, 64)
        g = draft.let("g", f"{h}.unflatten(-1, (-1, {width}))", h)
        scale = draft.let("scale", f"{g}.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / {levels}", g)
        q = draft.let("q", f"torch.round({g} / {scale}).clamp(-{levels}, {levels}).to(torch.int8)", g)
        return draft.let("flat", f"{q}.flatten(-2)", q), draft.let("scales", f"{scale}.squeeze(-1)", scale)
    if kind == "fixed":
        scale = draft.input("scale", "D", dtype="f32", values="0.01..0.1")
        return draft.let("out", f"(torch.round({h} / {scale}).clamp(-128.0, 127.0) * {scale}).to({x}.dtype)", x)
    if kind == "ternary":
        scale = draft.let("scale", f"{h}.abs().mean(dim=-1, keepdim=True).clamp(min=1e-6)", h)
        return draft.let("out", f"torch.round({h} / {scale}).clamp(-1.0, 1.0) * {scale}", h)
    if kind == "float8":
        scale = draft.let("scale", f"448.0 / {h}.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)", h)
        return draft.let("q", f"({h} * {scale}).clamp(-448.0, 448.0).to(torch.bfloat16)", h), draft.let(
            "inverse", f"1.0 / {scale}", scale
        )
    if kind == "log":
        return draft.let("out", f"torch.sign({h}) * torch.exp2(torch.round(torch.log2({h}.abs() + 1e-6)))", h)
    return draft.let("out", f"torch.sign({h}) * {h}.abs().mean(dim=-1, keepdim=True)", h)


@family("function")
def returns(draft: Draft) -> Outputs:
    """Advantages and returns of trajectories."""
    draft.dtype = "f32"
    b, t = draft.size("B", (64, 256, 1024, 4096)), draft.size("T", (32, 64, 128, 256))
    reward, value = draft.input("rewards", b, t), draft.input("values", b, t)
    kind = draft.choose("delta", "togo", "normalised", "mask", "kl")
    if kind == "delta":
        following = draft.input("next_values", b, t)
        done = draft.input("done", b, t, values="0..1")
        return draft.let(
            "delta", f"{reward} + {draft.number('gamma', 0.99)} * {following} * (1.0 - {done}) - {value}", reward
        )
    if kind == "togo":
        total = draft.let("togo", f"{reward}.sum(dim=1, keepdim=True) - {reward}.cumsum(dim=1) + {reward}", reward)
        return draft.let("advantage", f"{total} - {value}", total)
    if kind == "kl":
        new, old = draft.input("logp", b, t), draft.input("ref_logp", b, t)
        ratio = draft.let("diff", f"{old} - {new}", reward)
        return draft.let(
            "out",
            f"{reward} - {draft.number('beta', 0.05)} * (torch.exp({ratio}.clamp(max=10.0)) - {ratio} - 1.0)",
            reward,
        )
    advantage = draft.let("advantage", f"{reward} - {value}", reward)
    if kind == "mask":
        mask = draft.input("mask", b, t, values="0..1")
        mean = draft.let("mean", f"({advantage} * {mask}).sum() / {mask}.sum().clamp(min=1.0)", reward)
        return draft.let("out", f"({advantage} - {mean}) * {mask}", reward)
    return draft.let(
        "out",
        f"({advantage} - {advantage}.mean(dim=1, keepdim=True)) / ({advantage}.std(dim=1, keepdim=True) + 1e-8)",
        reward,
    )
