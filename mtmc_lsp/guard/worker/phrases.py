"""Says in the user's words why a guard refuses a call. Runs in workers, and in the user's program."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from mtmc_lsp.guard.conditions import MODULE
from mtmc_lsp.guard.worker.refusal import Refusal, Scope

MADE_FOR = "the kernels were made for"
MAX_VALUE_CHARACTERS = 60
STALE = "run mtmc optimize again"
COMPILED = "torch.compile traces the call; kernels with a backward pass run in eager mode alone"
NOT_COMPUTED = "which the kernels compute no gradient of: add it to grad= and optimise again"
GRADIENTS = "gradients are recorded{names}: call it under torch.no_grad() or torch.inference_mode()"
FIXED: Mapping[str, str] = {
    "torch.backends.cuda.matmul.": f"TF32 is off for matrix products; {MADE_FOR} calls that allow it",
    "torch.backends.cudnn.": f"TF32 is off for convolutions; {MADE_FOR} calls that allow it",
    "not torch.is_autocast_enabled()": f"autocast is on; {MADE_FOR} calls without it",
    "torch.is_autocast_enabled()": f"autocast is off; {MADE_FOR} calls under it",
    "are_deterministic_algorithms_enabled": (
        "deterministic algorithms are on, and the kernels add with atomic operations, in any order"
    ),
}
"""Phrases for conditions without values, by a part of their text."""


def phrase(refusal: Refusal) -> str:
    """One clause about the condition that does not hold."""
    condition, scope = refusal.condition, refusal.scope
    source = ast.unparse(condition)
    for part, text in FIXED.items():
        if part in source:
            return text
    if refusal.error:
        return f"`{refusal.text}` cannot be evaluated ({refusal.error})"
    if "torch.is_grad_enabled()" in source:
        return _gradients(source, scope)
    if source == "not torch.compiler.is_compiling()":
        return COMPILED
    if isinstance(condition, ast.Compare) and len(condition.ops) == 1:
        return _comparison(condition, scope)
    if isinstance(condition, ast.Call):
        return _call(condition, scope)
    if source == MODULE:
        return "the program runs the file in a way that leaves no module with the names that the guard compares"
    if isinstance(condition, ast.UnaryOp):
        operand = condition.operand
        return f"{scope.text(operand)} is {describe(scope.value(operand))}; {MADE_FOR} calls without it"
    return _generic(condition, scope)


def describe(value: Any) -> str:
    """A value as the user would write it, without the contents of tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, torch.Size):
        return str(tuple(value))
    if isinstance(value, type):
        return _class_name(value)
    text = str(value) if isinstance(value, (torch.dtype, torch.device)) else repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 3]}..."


def _generic(condition: ast.expr, scope: Scope) -> str:
    return f"`{scope.text(condition)}` does not hold"


def _gradients(source: str, scope: Scope) -> str:
    names = [name for name, tensor in _named_tensors(scope) if tensor.requires_grad]
    without = [name for name in names if f"{name}.requires_grad" in source]
    if without:
        return f"gradients are recorded for {', '.join(without)}, {NOT_COMPUTED}"
    shown = f" for {', '.join(names[:2])}{', ...' if len(names) > 2 else ''}" if names else ""
    return GRADIENTS.format(names=shown)


def _named_tensors(scope: Scope) -> list[tuple[str, Any]]:
    values = scope.value(ast.Name("tensors", ast.Load()))
    return list(zip(scope.tensors, values, strict=True))


def _place(device: Any) -> str:
    return "the CPU" if device.type == "cpu" else str(device)


def _class_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _article(kind: type) -> str:
    name = "None" if kind is type(None) else kind.__qualname__
    return name if name == "None" else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# Comparisons ---------------------------------------------------------------------------------------------------------


def _comparison(condition: ast.Compare, scope: Scope) -> str:
    left, right = condition.left, condition.comparators[0]
    for matches, write in COMPARISONS:
        if matches(left):
            return write(left, right, scope)
    actual = scope.value(left)
    if isinstance(condition.ops[0], ast.Is):
        return f"{scope.text(left)} is {describe(actual)}; {MADE_FOR} {describe(scope.value(right))}"
    if not isinstance(condition.ops[0], ast.Eq):
        return f"{scope.text(left)} is {describe(actual)}; the kernels need {scope.text(condition)}"
    if isinstance(right, ast.Constant) or not isinstance(actual, int):
        return f"{scope.text(left)} is {describe(actual)}; {MADE_FOR} {describe(scope.value(right))}"
    return (
        f"{scope.text(left)} is {describe(actual)} and {scope.text(right)} is {describe(scope.value(right))}; "
        f"{MADE_FOR} equal sizes"
    )


def _attribute(*names: str) -> Callable[[ast.expr], bool]:
    return lambda node: isinstance(node, ast.Attribute) and node.attr in names


def _method(*names: str) -> Callable[[ast.expr], bool]:
    return lambda node: isinstance(node, ast.Call) and _attribute(*names)(node.func)


def _is_type(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def _type(left: ast.expr, right: ast.expr, scope: Scope) -> str:
    assert isinstance(left, ast.Call)
    actual, expected = scope.value(left), scope.value(right)
    return f"{scope.text(left.args[0])} is {_article(actual)}; {MADE_FOR} {_article(expected)}"


def _dtype(left: ast.expr, right: ast.expr, scope: Scope) -> str:
    assert isinstance(left, ast.Attribute)
    actual, expected = (str(scope.value(node)).removeprefix("torch.") for node in (left, right))
    return f"{scope.text(left.value)} is {actual}; {MADE_FOR} {expected}"


def _autocast_dtype(left: ast.expr, right: ast.expr, scope: Scope) -> str:
    actual, expected = (str(scope.value(node)).removeprefix("torch.") for node in (left, right))
    return f"autocast's dtype is {actual}; {MADE_FOR} {expected}"


def _rank(left: ast.expr, right: ast.expr, scope: Scope) -> str:
    assert isinstance(left, ast.Attribute)
    return f"{scope.text(left.value)} has {scope.value(left)} dimensions; {MADE_FOR} {scope.value(right)}"


def _shape(left: ast.expr, right: ast.expr, scope: Scope) -> str:
    assert isinstance(left, ast.Attribute)
    tensor, shape, expected = scope.text(left.value), describe(scope.value(left)), describe(scope.value(right))
    if isinstance(right, ast.Attribute):
        return f"{tensor} has the shape {shape} and {scope.text(right.value)} {expected}; {MADE_FOR} equal shapes"
    return f"{tensor} has the shape {shape}; {MADE_FOR} {expected}"


def _stride(left: ast.expr, right: ast.expr, scope: Scope) -> str:
    assert isinstance(left, ast.Call) and isinstance(left.func, ast.Attribute)
    tensor, dimension = left.func.value, scope.value(left.args[0])
    strides = tuple(scope.value(tensor).stride())
    return (
        f"{scope.text(tensor)} has the strides {strides}; "
        f"{MADE_FOR} stride {describe(scope.value(right))} in dimension {dimension}"
    )


def _elements(left: ast.expr, right: ast.expr, scope: Scope) -> str:
    assert isinstance(left, ast.Call) and isinstance(left.func, ast.Attribute)
    return f"{scope.text(left.func.value)} has no elements"


def _device(left: ast.expr, right: ast.expr, scope: Scope) -> str:
    assert isinstance(left, ast.Attribute)
    return (
        f"{scope.text(left.value)} is on {_place(scope.value(left))} and {scope.tensors[0]} "
        f"on {_place(scope.value(right))}; the kernels need one device"
    )


def _mode(left: ast.expr, right: ast.expr, scope: Scope) -> str:
    assert isinstance(left, ast.Attribute)
    modes = {True: ("training mode", ".train()"), False: ("evaluation mode", ".eval()")}
    if isinstance(right, ast.Attribute):
        pairs = [f"{scope.text(node.value)} is in {modes[bool(scope.value(node))][0]}" for node in (left, right)]
        return f"{' and '.join(pairs)}; {MADE_FOR} equal modes"
    actual, (expected, remedy) = modes[bool(scope.value(left))][0], modes[bool(scope.value(right))]
    return f"{scope.text(left.value)} is in {actual}; {MADE_FOR} {expected}: call {remedy} before"


COMPARISONS: tuple[tuple[Callable[[ast.expr], bool], Callable[[ast.expr, ast.expr, Scope], str]], ...] = (
    (_is_type, _type),
    (_attribute("dtype"), _dtype),
    (_method("get_autocast_dtype"), _autocast_dtype),
    (_attribute("ndim"), _rank),
    (_attribute("shape"), _shape),
    (_attribute("device"), _device),
    (_attribute("training"), _mode),
    (_method("stride"), _stride),
    (_method("numel"), _elements),
)
"""Comparisons by the form of their left side."""


# Calls ---------------------------------------------------------------------------------------------------------------


def _call(condition: ast.Call, scope: Scope) -> str:
    name = condition.func.attr if isinstance(condition.func, ast.Attribute) else ast.unparse(condition.func)
    writer = CALLS.get(name)
    return writer(condition, scope) if writer is not None else _generic(condition, scope)


def _not_instance(condition: ast.Call, scope: Scope) -> str:
    item, kind = condition.args
    expected = "tensor" if ast.unparse(kind) == "torch.Tensor" else ast.unparse(kind)
    return f"{scope.text(item)} is {_article(type(scope.value(item)))}, not a {expected}"


def _not_contiguous(condition: ast.Call, scope: Scope) -> str:
    assert isinstance(condition.func, ast.Attribute)
    return _layout(condition.func.value, scope)


def _layout(node: ast.expr, scope: Scope) -> str:
    tensor = scope.value(node)
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return f"{scope.text(node)} is not contiguous (shape {shape}, strides {strides}); {MADE_FOR} a contiguous one"


def _not_plain(condition: ast.Call, scope: Scope) -> str:
    import torch

    for name, tensor in _named_tensors(scope):
        if not isinstance(tensor, torch.Tensor):
            return f"{name} is {_article(type(tensor))}, not a tensor"
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"{name} is {_article(type(tensor))}, a subclass of tensors that kernels cannot read"
        if tensor.layout is not torch.strided or tensor.is_nested:
            return f"{name} is {'nested' if tensor.is_nested else 'sparse'}; {MADE_FOR} dense tensors"
        if tensor.is_neg():
            return f"{name} is negated lazily; call resolve_neg() on it"
    if not _is_traced():
        # Ask the guard's helper for each tensor: under Triton's interpreter it requires CPU tensors instead.
        is_plain_call = scope.value(condition.func)
        for name, tensor in _named_tensors(scope):
            if not is_plain_call((tensor,)):
                where = "Triton launches on the current GPU" if tensor.is_cuda else "the kernels run on a GPU"
                return f"{name} is on {_place(tensor.device)}; {where}"
    return "the call is traced or transformed (jit.trace, make_fx, vmap, jvp), which cannot see kernels"


def _is_traced() -> bool:
    import torch

    return bool(
        torch.autograd.forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    )


def _other_type_or_shape(condition: ast.Call, scope: Scope) -> str:
    dtype, shape, *tensors = condition.args
    expected, expected_shape = scope.value(dtype), scope.value(shape)
    for node in tensors:
        tensor, name = scope.value(node), scope.text(node)
        if tensor.dtype != expected:
            return f"{name} is {str(tensor.dtype)[6:]}; {MADE_FOR} {str(expected)[6:]}"
        if tensor.shape != expected_shape:
            return f"{name} has the shape {tuple(tensor.shape)}; {MADE_FOR} {expected_shape}"
        if not tensor.is_contiguous():
            return _layout(node, scope)
    return _generic(condition, scope)


def _other_class(condition: ast.Call, scope: Scope) -> str:
    module, kind = condition.args
    return f"{scope.text(module)} is {_article(type(scope.value(module)))}; {MADE_FOR} {_article(scope.value(kind))}"


def _other_module(condition: ast.Call, scope: Scope) -> str:
    module, kind, *rest = condition.args
    reason = _changed_module(module, kind, scope)
    return reason or (_other_length(module, scope.value(rest[0]), scope) if rest else _generic(condition, scope))


def _one_other_module(condition: ast.Call, scope: Scope) -> str:
    kind, indices, *modules = condition.args
    keys = scope.value(indices)
    for module in modules:
        if reason := _changed_module(module, kind, scope) or _other_indices(module, keys, scope):
            return reason
    return _generic(condition, scope)


def _other_indices(node: ast.expr, keys: range | None, scope: Scope) -> str:
    """How the indices of a container's modules differ from the captured ones; empty if they do not."""
    actual = [*scope.value(node)._modules] if keys is not None else []
    if keys is None or actual == [*map(str, keys)]:
        return ""
    if len(actual) != len(keys):
        return _other_length(node, len(keys), scope)
    return f"the modules of {scope.text(node)} are in another order"


def _changed_module(node: ast.expr, kind_node: ast.expr, scope: Scope) -> str:
    """How a call of a module differs from the captured one; empty if it does not."""
    module, kind, name = scope.value(node), scope.value(kind_node), scope.text(node)
    if _class_name(type(module)) != (_class_name(kind) if isinstance(kind, type) else kind):
        return f"{name} is {_article(type(module))}; {MADE_FOR} {scope.text(kind_node)}"
    if module._forward_hooks or module._forward_pre_hooks:
        return f"{name} has hooks, which the kernels would not call"
    return _replaced_forward(module, name)


def _other_length(node: ast.expr, length: int, scope: Scope) -> str:
    container = scope.value(node)
    items = "parameters" if type(container).__name__ == "ParameterList" else "modules"
    return f"{scope.text(node)} has {len(container)} {items}; {MADE_FOR} {length}"


def _other_hooks(condition: ast.Call, scope: Scope) -> str:
    module, kind, before, after = (scope.value(node) for node in condition.args)
    name = scope.text(condition.args[0])
    if _class_name(type(module)) != (_class_name(kind) if isinstance(kind, type) else kind):
        return f"{name} is {_article(type(module))}; {MADE_FOR} {scope.text(condition.args[1])}"
    hooks = (hook.__name__ if callable(hook) else hook[0].rpartition(".")[2] for hook in (*before, *after))
    known = ", ".join(hooks)
    return _replaced_forward(module, name) or f"{name} has other hooks, or other settings of them; {MADE_FOR} {known}"


def _replaced_forward(module: Any, name: str) -> str:
    return f"forward of {name} is replaced" if "forward" in module.__dict__ else ""


def _other_values(condition: ast.Call, scope: Scope) -> str:
    values = scope.value(condition.args[0])
    for node in condition.args[1:]:
        module = scope.value(node)
        for attribute, expected in values.items():
            actual = getattr(module, attribute, None)
            same = [*actual] == expected if isinstance(actual, tuple) else actual == expected
            if not same or (not isinstance(expected, list) and type(actual) is not type(expected)):
                return f"{scope.text(node)}.{attribute} is {describe(actual)}; {MADE_FOR} {describe(expected)}"
    return _generic(condition, scope)


def _other_items(condition: ast.Call, scope: Scope) -> str:
    actual, expected = (describe(scope.value(node)) for node in condition.args)
    return f"{scope.text(condition.args[0])} is {actual}; {MADE_FOR} {expected}"


def _overlap(condition: ast.Call, scope: Scope) -> str:
    tensors, updated = condition.args
    assert isinstance(tensors, ast.Tuple)
    names = [scope.text(node) for node in tensors.elts]
    written = ", ".join(names[: scope.value(updated)])
    return f"{written} is written and shares memory with another of {', '.join(names)}"


def _unaligned(condition: ast.Call, scope: Scope) -> str:
    tensors = condition.args[0]
    assert isinstance(tensors, ast.Tuple)
    names = [scope.text(node) for node in tensors.elts if scope.value(node).data_ptr() % 16]
    return f"{names[0] if names else 'a tensor'} does not start at a multiple of 16 bytes, as TMA needs it"


def _other_code(condition: ast.Call, scope: Scope) -> str:
    return f"the code of {scope.text(condition.args[0])} changed since the kernels were made: {STALE}"


CALLS: Mapping[str, Callable[[ast.Call, Scope], str]] = {
    "isinstance": _not_instance,
    "is_contiguous": _not_contiguous,
    "_is_plain_gpu_call": _not_plain,
    "_are_contiguous_with": _other_type_or_shape,
    "_is_unchanged_module": _other_module,
    "_are_unchanged_modules": _one_other_module,
    "_has_class": _other_class,
    "_has_captured_hooks": _other_hooks,
    "_have_values": _other_values,
    "_has_items": _other_items,
    "_do_not_overlap": _overlap,
    "_are_aligned": _unaligned,
    "_has_source": _other_code,
}
"""Conditions that are calls, by the name of the function or method."""
