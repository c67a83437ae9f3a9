"""ATen nodes as readable Python calls, for operations that stay in PyTorch."""

from __future__ import annotations

import re

from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.core.graph import INPUT_DEVICE, Argument, Node, Ref
from mtmc_lsp.core.sizes import Number, Size, rename_symbols

PLAIN = frozenset(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d matmul bmm mm addmm baddbmm cat stack softmax "
    "log_softmax relu sigmoid tanh exp layer_norm group_norm batch_norm max_pool1d max_pool2d max_pool3d cumsum cumprod "
    "where gather index_select einsum flip tril triu topk sort argsort gelu_ mean sum amax amin permute transpose t "
    "tensor "
    "abs acos asin atan bitwise_not ceil cos cosh erf erfc exp2 expm1 floor isinf isnan log log10 log1p log2 logical_not neg "
    "reciprocal round rsqrt sign sin sinh sqrt tan trunc "
    "add atan2 bitwise_and bitwise_or bitwise_xor div eq fmod ge gt le logical_and logical_or logical_xor lt maximum minimum "
    "mul ne pow remainder rsub sub "
    "addcdiv addcmul clamp clamp_max clamp_min masked_fill "
    "all any argmax argmin logsumexp prod var_mean "
    "clone convolution embedding native_group_norm native_layer_norm roll scatter scatter_add select "
    "arange full full_like ones ones_like scalar_tensor zeros zeros_like".split()
)
"""Operations for which ``torch.<name>`` takes ATen's positional arguments. It takes half to two thirds of the host's time of
``torch.ops.aten.<name>``."""

FUNCTIONAL = {
    "linear": "torch.nn.functional.linear",
    "scaled_dot_product_attention": "torch.nn.functional.scaled_dot_product_attention",
    "gelu": "torch.nn.functional.gelu",
    "silu": "torch.nn.functional.silu",
    "hardtanh": "torch.nn.functional.hardtanh",
    "linalg_vector_norm": "torch.linalg.vector_norm",
    "pad": "torch.nn.functional.pad",
    "adaptive_avg_pool2d": "torch.nn.functional.adaptive_avg_pool2d",
    "avg_pool2d": "torch.nn.functional.avg_pool2d",
}
WHOLE = 2**63 - 1
"""The end of a slice that has none."""
LISTS = frozenset("split split_with_sizes chunk tensor_split unbind unsafe_split unsafe_split_with_sizes".split())
"""Operations that return a list, also of a single tensor."""
METHODS = frozenset("view reshape permute transpose unsqueeze squeeze expand contiguous".split())
"""View operations, written as methods."""


def torch_call(node: Node, names: dict[Ref, str], size_text: dict[str, str], first: str) -> str:
    """The call as Python over the launcher's variables.

    Args:
        names: the variable of each value.
        size_text: Python for each named size, and for each run-time number that is an argument.
        first: the variable of an input; new tensors are created on its device.
    """
    name, overload = node.op.split(".")[1], node.op.split(".")[2]
    args = [argument_text(item, names, size_text) for item in node.args]
    keywords = {key: argument_text(item, names, size_text, key) for key, item in node.kwargs.items()}
    if node.kwargs.get("device") == INPUT_DEVICE:
        keywords["device"] = f"{first}.device"
    kwargs = [f"{key}={text}" for key, text in keywords.items()]
    if name == "view" and overload == "default":
        # A library call, such as attention, may return other strides than at capture. A view would then fail.
        name = "reshape"
    if name == "slice" and not kwargs and (text := _sliced(node, args)):
        return text
    if name in METHODS and args:
        return f"{args[0]}.{name}({', '.join([*args[1:], *kwargs])})"
    if name in FUNCTIONAL and (overload == "default"):
        return f"{FUNCTIONAL[name]}({', '.join([*args, *kwargs])})"
    if name == "_to_copy" and keywords.keys() == {"dtype"} and isinstance(node.args[0], Ref):
        return f"{args[0]}.to({keywords['dtype']}, copy=True)"
    if name in PLAIN:
        return f"torch.{name}({', '.join([*args, *kwargs])})"
    text = f"torch.ops.{node.op}({', '.join([*args, *kwargs])})"
    return f"{text}[0]" if name in LISTS and len(node.outputs) == 1 else text


def _sliced(node: Node, args: list[str]) -> str:
    """A slice as an index, which takes the host less time than a call of the operator; empty if the dimension is negative."""
    usual: list[Argument] = [0, None, None, 1]
    dim, start, end, step = [*node.args[1:], *usual[len(node.args) - 1 :]]
    if not isinstance(dim, int) or dim < 0 or step != 1:
        return ""
    first = "" if start in (None, 0) else args[2]
    last = "" if end is None or (isinstance(end, int) and end >= WHOLE) else args[3]
    is_plain = all(re.fullmatch(r"-?\w*", text) for text in (first, last))
    index = f"{first}:{last}" if is_plain else f"{first} : {last}".strip()
    return f"{args[0]}[{':, ' * dim}{index}]"


def argument_text(value: Argument, names: dict[Ref, str], size_text: dict[str, str], key: str = "") -> str:
    """One argument as Python."""
    if isinstance(value, Ref):
        return names[value]
    if isinstance(value, Size):
        return size_python(value, size_text)
    if isinstance(value, Number):
        return rename_symbols(value.text, size_text)
    if isinstance(value, tuple):
        return f"[{', '.join(argument_text(item, names, size_text) for item in value)}]"
    if isinstance(value, str) and value.startswith("torch."):
        return value
    if isinstance(value, str) and (key == "dtype" or value in ITEMSIZE):
        # A positional dtype has no keyword to identify it. No other ATen string argument has such a value.
        return f"torch.{value}"
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return f'float("{value}")'
    return repr(value)


def size_python(size: Size, size_text: dict[str, str]) -> str:
    """A size as Python, with each named size replaced by its text."""
    text = str(size)
    for name in sorted(set(size.symbols()), key=len, reverse=True):
        replacement = size_text.get(name, name)
        if replacement != name:
            text = str(size.substitute({name: Size.symbol(replacement)}))
            size = size.substitute({name: Size.symbol(replacement)})
    return text
