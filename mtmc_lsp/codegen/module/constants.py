"""Literal tensors in the user's code, such as ``torch.tensor([1.0, 2.0, 1.0])``. The launcher creates each of them once."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mtmc_lsp.codegen.kernel.snippets import call_text
from mtmc_lsp.core.graph import Argument, Node

CONSTANT = "_constant"
CONSTANT_SOURCE = f'''_CONSTANTS = {{}}


def {CONSTANT}(numbers, dtype, device):
    """A tensor of these numbers, cached per device: a copy in every call would synchronise with the device."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return torch.tensor(numbers, dtype=dtype, device=device)
    tensor = _CONSTANTS.get((numbers, dtype, device))
    if tensor is None:
        with torch.inference_mode(False):
            tensor = _CONSTANTS[numbers, dtype, device] = torch.tensor(numbers, dtype=dtype, device=device)
    return tensor
'''


def is_literal_tensor(node: Node) -> bool:
    """Whether a node is a literal tensor whose values are usable as cache keys; others remain a torch call."""
    return node.op == "aten.tensor.default" and not any(map(_is_special, _numbers(node.args[0])))


def _numbers(value: Argument) -> Iterator[Argument]:
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    else:
        yield value


def _is_special(value: Argument) -> bool:
    """Values that do not work as cache keys: NaN differs from itself, and -0.0 equals 0.0."""
    return isinstance(value, float) and (math.isnan(value) or (value == 0.0 and math.copysign(1.0, value) < 0.0))


def constant_text(node: Node, first: str) -> str:
    """Python for a literal tensor on the device of the tensor in the variable ``first``."""
    return call_text(CONSTANT, [_text(node.args[0]), f"torch.{node.type.dtype}", f"{first}.device"], "    ")


def _text(value: Argument) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    return f'float("{value}")' if isinstance(value, float) and math.isinf(value) else repr(value)
