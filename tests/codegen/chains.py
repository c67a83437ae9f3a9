"""Random chains of tensor operations as a user's source text, drawn by hypothesis or by a random generator.

Each step is evaluated on real tensors when it is drawn, so a chain always runs. A value is *exact* if no operation on the way
rounded. Only exact values are used in discontinuous operations (comparisons, argmax, casts to integers), where a rounding
difference would change the result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

Pick = Callable[[Sequence[Any]], Any]
DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "f64": torch.float64,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}
SIZES = (1, 2, 3, 5, 7, 8, 13)
MAX_ELEMENTS = 400
"""Maximum number of elements of any value in a chain."""
MAX_MAGNITUDE = 1e4
"""Chains stop at values beyond this magnitude, which is close to the float16 range."""

UNARY = (
    "torch.sigmoid({x})", "torch.tanh({x})", "torch.sin({x})", "torch.cos({x})", "F.silu({x})", "F.gelu({x})",
    "torch.exp(-{x}.abs())", "torch.log1p({x}.abs())", "torch.sqrt({x}.abs() + 0.5)", "torch.rsqrt({x}.abs() + 1)",
    "torch.erf({x})", "F.softplus({x})", "F.elu({x})", "torch.expm1(torch.clamp({x}, -2, 2))", "{x}.square()",
    "torch.reciprocal({x}.abs() + 0.5)", "F.gelu({x}, approximate='tanh')", "F.mish({x})", "F.leaky_relu({x}, 0.2)",
    "F.hardswish({x})", "torch.log2({x}.abs() + 1)", "torch.exp2(-{x}.abs())", "F.logsigmoid({x})", "{x} ** 2", "{x} ** 0.5",
    "torch.atan({x})", "F.relu6({x})", "F.hardsigmoid({x})", "F.softsign({x})", "torch.pow({x}.abs() + 0.5, 1.5)", "torch.log({x}.abs() + 0.1)",
)  # fmt: skip
EXACT_UNARY = (
    "torch.relu({x})", "{x}.abs()", "-{x}", "{x}.clamp(min=-1)", "{x}.clamp(-2, 3)", "torch.sign({x})", "torch.nan_to_num({x})",
    "torch.floor({x})", "torch.ceil({x})", "torch.round({x})", "torch.trunc({x})", "torch.logical_not({x})", "{x} > 0",
    "{x} <= 0.5", "{x} == 0", "{x}.masked_fill({x} < 0, 0.25)", "torch.where({x} > 0, {x}, -1.0)", "torch.where({x} > 0, 1, {x})",
    "torch.isnan({x})", "~{x}", "{x}.clone()", "torch.zeros_like({x})", "torch.full_like({x}, 2)",
)  # fmt: skip
SCALAR = (
    "{x} * 2",
    "{x} + 1",
    "1 - {x}",
    "{x} * 0.5",
    "{x} - 0.25",
    "{x} / 3",
    "2.0 / ({x}.abs() + 1)",
    "{x} // 2",
    "{x} % 3",
    "{x} * True",
)
INTEGER = ("{x} << 1", "{x} >> 1", "{x} & 3", "{x} | 4", "{x} ^ 1", "{x} // 3", "{x} % 4", "{x} % -3", "{x} // -2",
           "torch.div({x}, 3, rounding_mode='trunc')", "torch.fmod({x}, 3)", "{x} ** 2")  # fmt: skip
BINARY = ("{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} / ({y}.abs() + 0.5)", "torch.add({x}, {y}, alpha=2)", "torch.lerp({x}, {y}, 0.25)",
          "torch.addcmul({x}, {x}, {y})", "torch.atan2({x}, {y}.abs() + 1)")  # fmt: skip
EXACT_BINARY = ("torch.maximum({x}, {y})", "torch.minimum({x}, {y})", "torch.where({x} > 0, {x}, {y})", "{x} > {y}", "{x} == {y}", "{x} <= {y}",
                "torch.logical_and({x}, {y})", "torch.logical_or({x}, {y})", "{x} & {y}", "{x} | {y}", "{x} ^ {y}",
                "torch.where({x}.bool(), {y}, 0)")  # fmt: skip
REDUCTIONS = ("{x}.sum({d}{k})", "{x}.mean({d}{k})", "{x}.var({d}{k})", "{x}.std({d}, unbiased=False{k})", "torch.logsumexp({x}, {d}{k})",
              "torch.linalg.vector_norm({x}, 2, {d}{k})", "torch.linalg.vector_norm({x}, 1, {d}{k})")  # fmt: skip
EXACT_REDUCTIONS = ("{x}.amax({d}{k})", "{x}.amin({d}{k})")
ONE_DIM = ("torch.softmax({x}, {d})", "torch.log_softmax({x}, {d})", "torch.cumsum({x}, {d})", "{x}.prod({d}{k})", "torch.cumprod({x}, {d})",
           "torch.logcumsumexp({x}, {d})", "F.normalize({x}.float(), dim={d})")  # fmt: skip
EXACT_ONE_DIM = ("{x}.argmax({d}{k})", "{x}.argmin({d}{k})", "{x}.any({d}{k})", "{x}.all({d}{k})", "{x}.max({d}{k})[0]", "{x}.min({d}{k})[1]",
                 "{x}.max({d}{k}).indices", "torch.cummax({x}, {d})[0]")  # fmt: skip
WHOLE = (
    "{x}.sum()",
    "{x}.mean()",
    "{x}.var()",
    "F.layer_norm({x}, {x}.shape[-1:])",
    "F.rms_norm({x}, {x}.shape[-1:])",
    "{x}.norm()",
)
EXACT_WHOLE = ("{x}.max()", "{x}.min()", "{x}.any()", "{x}.all()", "{x}.argmax()")
VIEWS = ("{x}.transpose({d}, {e})", "{x}.unsqueeze({d})", "{x}.squeeze({d})", "{x}.flatten()", "{x}.flip({d})", "{x}[..., 1:]", "{x}[..., ::2]",
         "{x}[:-1]", "{x}[-1]", "{x}[0]", "torch.cat(({x}, {x} * 2), {d})", "torch.stack(({x}, -{x}), {d})", "F.pad({x}, (1, 2))", "F.pad({x}, (1, 0), value=1)",
         "{x}.unsqueeze(0).expand(3, *{x}.shape)", "{x}.select({d}, 0)", "{x}.flatten(0, 1)", "{x}.movedim({d}, 0)", "torch.roll({x}, 1, {d})",
         "{x}.reshape({x}.shape[0], -1)", "{x}.mT", "torch.chunk({x}, 2, {d})[0]", "{x}.contiguous()", "torch.tril({x})", "{x}.narrow({d}, 0, 1)")  # fmt: skip
CASTS = (
    "{x}.float()",
    "{x}.half()",
    "{x}.double()",
    "{x}.to(torch.int32)",
    "{x}.long()",
    "{x}.bool()",
    "{x}.to(torch.int8)",
)


@dataclass(frozen=True)
class Value:
    """A variable of the chain."""

    name: str
    tensor: torch.Tensor
    exact: bool


@dataclass
class Chain:
    """A function's source text, with its directive."""

    input_specs: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    inputs: int = 0

    @property
    def text(self) -> str:
        arguments = ", ".join(value.name for value in self.values[: self.inputs])
        sizes = "".join(f" {name}={value}" for name, value in self.sizes.items())
        returned = ", ".join(self.results)
        body = "\n    ".join([*self.lines, f"return {returned}"])
        return (
            "import torch\nimport torch.nn.functional as F\n\n"
            f"# mtmc: {' '.join(self.input_specs)}{sizes}\ndef f({arguments}):\n    {body}\n"
        )


def draw_chain(pick: Pick, steps: int = 6) -> Chain:
    """Draw a chain; ``pick`` makes every choice."""
    chain = Chain()
    shape = [(size, "") for size in (pick(SIZES) for _ in range(pick((0, 1, 2, 2, 3, 3, 4))))]
    while _numel(shape) > MAX_ELEMENTS:
        shape.pop()
    named_shape = [(size, _size_name(chain, size) if size > 1 and pick((True, False)) else "") for size, _ in shape]
    for number in range(pick((1, 2, 2, 3))):
        _draw_input(chain, "xyz"[number], named_shape, number == 0, pick)
    chain.inputs = len(chain.values)
    for _ in range(pick(range(1, steps + 1))):
        _draw_step(chain, pick)
    computed = [value.name for value in chain.values[chain.inputs :]]
    if not computed:
        chain.lines.append("a0 = x + x")
        computed = ["a0"]
    chain.results = [computed[-1]]
    extra = pick(computed)
    if pick((True, False, False)) and extra != computed[-1]:
        chain.results.append(extra)
    return chain


def _numel(shape: Sequence[tuple[int, str]]) -> int:
    total = 1
    for size, _ in shape:
        total *= size
    return total


def _size_name(chain: Chain, size: int) -> str:
    name = "ABCD"[len(chain.sizes)]
    chain.sizes[name] = size
    return name


def _draw_input(chain: Chain, name: str, shape: list[tuple[int, str]], first: bool, pick: Pick) -> None:
    """Draw an input that broadcasts with the first one, with some dtype and layout."""
    input_shape = list(shape)
    if not first:
        input_shape = input_shape[pick(range(len(input_shape) + 1)) :] if pick((False, False, True)) else input_shape
        input_shape = [(1, "") if pick((False, False, True)) else item for item in input_shape]
    dtype = pick(("f32", "f32", "f32", "f16", "f64", "i32", "i64", "bool"))
    layout = pick(("dense", "dense", "permuted", "sliced"))
    order = list(range(len(input_shape)))
    if layout == "permuted":
        order = [order.pop(pick(range(len(order)))) for _ in range(len(order))]
    strides = ["0"] * len(input_shape)
    stride_text = "2" if layout == "sliced" else "1"
    stride_numbers, stride = [0] * len(input_shape), 2 if layout == "sliced" else 1
    for dim in reversed(order):
        strides[dim], stride_numbers[dim] = stride_text, stride
        stride_text = f"{stride_text}*{input_shape[dim][1] or input_shape[dim][0]}"
        stride *= input_shape[dim][0]
    text = ",".join(label or str(size) for size, label in input_shape)
    tail = "{" + ",".join(strides) + "}" if layout != "dense" and input_shape else ""
    tail += "@-4..5" if dtype.startswith("i") else ""
    chain.input_specs.append(f"{name}={dtype}[{text}]{tail}")
    generator = torch.Generator().manual_seed(len(chain.values))
    value = torch.randint(-4, 6, [size for size, _ in input_shape], generator=generator).to(DTYPES[dtype])
    strided = torch.empty_strided(value.shape, stride_numbers, dtype=value.dtype)
    chain.values.append(Value(name, strided.copy_(value), True))


def _draw_step(chain: Chain, pick: Pick) -> None:
    value = pick(chain.values[-3:] if pick((True, True, False)) else chain.values)
    other = pick(chain.values)
    family = pick(
        (
            "unary",
            "unary",
            "scalar",
            "binary",
            "binary",
            "binary",
            "reduction",
            "reduction",
            "one",
            "whole",
            "view",
            "view",
            "cast",
        )
    )
    exact = value.exact and (family != "binary" or other.exact)
    integer = not value.tensor.is_floating_point() and value.tensor.dtype is not torch.bool
    exact_templates, rounding_templates = {
        "unary": (EXACT_UNARY, INTEGER if integer else UNARY),
        "scalar": ((), SCALAR),
        "binary": (EXACT_BINARY, BINARY),
        "reduction": (EXACT_REDUCTIONS, REDUCTIONS),
        "one": (EXACT_ONE_DIM, ONE_DIM),
        "whole": (EXACT_WHOLE, WHOLE),
        "view": (VIEWS, ()),
        "cast": (CASTS, ()),
    }[family]
    # Discontinuous operations need exact values. Views and casts between floats are always allowed.
    is_view = family == "view"
    template = pick([*exact_templates, *rounding_templates] if exact or is_view else (rounding_templates or CASTS[:3]))
    rank = value.tensor.dim()
    dims = list(range(-rank, rank)) or [0]
    d: object = pick(dims)
    if family == "reduction" and rank > 1 and pick((True, False)):
        first = pick(range(rank))
        d = (first, (first + 1) % rank - (rank if pick((True, False)) else 0))
    keep = pick(("", ", keepdim=True"))
    text = template.format(x=value.name, y=other.name, d=d, e=pick(dims), k=keep)
    scope = {item.name: item.tensor for item in chain.values} | {"torch": torch, "F": torch.nn.functional}
    try:
        result = eval(text, scope)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AttributeError):
        return
    if not isinstance(result, torch.Tensor) or not 0 < result.numel() <= MAX_ELEMENTS:
        return
    if bool((result.double().abs() > MAX_MAGNITUDE).any()):
        return
    stays_exact = (template in exact_templates and exact) or not result.is_floating_point()
    name = f"a{len(chain.values) - chain.inputs}"
    chain.lines.append(f"{name} = {text}")
    chain.values.append(Value(name, result, stays_exact))


@st.composite
def chains(draw: Any) -> Chain:
    """Chains as a hypothesis strategy."""
    return draw_chain(lambda items: draw(st.sampled_from(list(items))))


def random_chain(seed: int) -> Chain:
    """A reproducible chain for a seed, for searches without hypothesis."""
    return draw_chain(random.Random(seed).choice)
