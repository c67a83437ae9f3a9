"""Convolutions and pooling."""

from __future__ import annotations

from mtmc_lsp.programs.draft import UNKNOWN, Draft, Tensor


def convolution(
    draft: Draft,
    x: Tensor,
    out: str,
    kernel: int = 3,
    name: str = "conv",
    *,
    stride: int = 1,
    depthwise: bool = False,
    bias: bool | None = None,
    to: str = "",
) -> Tensor:
    """A convolution over the dimensions after the channels, with the padding that keeps their sizes at stride 1."""
    rank, channels, padding = x.rank - 2, x.dims[1], kernel // 2
    has_bias = draft.chance(0.5) if bias is None else bias
    spatial = x.dims[2:] if stride == 1 else (UNKNOWN,) * rank
    dims = (x.dims[0], out, *spatial)
    steps = f", stride={stride}" if stride > 1 else ""
    pads = f", padding={padding}" if padding else ""
    if draft.is_module:
        given, made = draft.constructed(channels), draft.constructed(out)
        groups = f", groups={given}" if depthwise else ""
        settings = f"{given}, {made}, {kernel}{steps}{pads}{groups}{'' if has_bias else ', bias=False'}"
        text = f"{draft.layer(name, f'nn.Conv{rank}d({settings})')}({x})"
    else:
        weight = draft.parameter(f"{name}_weight", out, "1" if depthwise else channels, *[str(kernel)] * rank)
        offset = f", {draft.parameter(f'{name}_bias', out)}" if has_bias else ""
        groups = f", groups={weight}.shape[0]" if depthwise else ""
        text = f"F.conv{rank}d({x}, {weight}{offset}{steps}{pads}{groups})"
    return draft.let(to, text, x, dims=dims) if to else draft.then(x, text, dims=dims)


def pooled(draft: Draft, x: Tensor) -> Tensor:
    """Local pooling of images or signals."""
    rank, kind = x.rank - 2, draft.choose("max", "avg")
    kernel, stride, padding = draft.choose((2, 2, 0), (3, 2, 1), (3, 1, 1), (4, 4, 0))
    pads = f", padding={padding}" if padding else ""
    text = f"F.{kind}_pool{rank}d({x}, {kernel}, stride={stride}{pads})"
    return draft.then(x, text, dims=(*x.dims[:2], *[UNKNOWN] * rank))


def global_pooled(draft: Draft, x: Tensor, *, keepdim: bool = False) -> Tensor:
    """The mean or maximum of each channel."""
    dims = "(2, 3)" if x.rank == 4 else "2"
    narrow = (*x.dims[:2], *(["1"] * (x.rank - 2) if keepdim else []))
    kind = draft.choose("mean", "mean", "amax", "adaptive")
    if kind == "adaptive":
        text = f"F.adaptive_avg_pool{x.rank - 2}d({x}, 1)" + ("" if keepdim else ".flatten(1)")
    else:
        text = draft.call(x, kind, f"dim={dims}{', keepdim=True' if keepdim else ''}")
    return draft.then(x, text, "pooled", dims=narrow)
