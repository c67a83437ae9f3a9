"""Helper functions of guards, as they are written into the user's file."""

from __future__ import annotations

PLAIN_CALL = "_is_plain_gpu_call"
CAN_LAUNCH = "_can_launch_on"
ARE_ACCEPTED, ACCEPT = "_are_like_accepted", "_accept"
IS_UNCHANGED_MODULE, ARE_UNCHANGED_MODULES = "_is_unchanged_module", "_are_unchanged_modules"
HAS_CLASS = "_has_class"
HAS_CAPTURED_HOOKS = "_has_captured_hooks"
NO_OVERLAP = "_do_not_overlap"
HAVE_TYPE_AND_SHAPE = "_are_contiguous_with"
HAVE_VALUES = "_have_values"
HAS_ITEMS = "_has_items"
ALIGNED = "_are_aligned"
REPORTED = "_reported"
HAVE_NUMBER_TYPES = "_have_number_types"
TF32_HELPERS = {"cublas": "_may_products_use_tf32", "cudnn": "_may_convolutions_use_tf32"}
"""By the library whose setting they read."""
GUARD_HELPERS = {
    TF32_HELPERS["cublas"]: '''def _may_products_use_tf32() -> bool:
    """Whether the user allows TF32 in float32 products. Torch refuses to read the setting that is unused."""
    try:
        return torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision == "tf32"
''',
    TF32_HELPERS["cudnn"]: '''def _may_convolutions_use_tf32() -> bool:
    """Whether the user allows TF32 in float32 convolutions. Torch refuses to read the setting that is unused."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return torch.backends.cudnn.conv.fp32_precision == "tf32"
''',
    ALIGNED: '''def _are_aligned(tensors) -> bool:
    """Whether all tensors start at multiples of 16 bytes, as TMA requires; torch.compile cannot tell: False."""
    return not torch.compiler.is_compiling() and all(t.data_ptr() % 16 == 0 for t in tensors)
''',
    CAN_LAUNCH: '''def _can_launch_on(device) -> bool:
    """Whether launches run on this GPU, and nothing traces (jit, make_fx) or transforms (vmap, jvp) the call."""
    return (
        device == torch.cuda.current_device()
        and torch.autograd.forward_ad._current_level < 0
        and not torch._C._is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
    )
''',
    PLAIN_CALL: '''def _is_plain_gpu_call(tensors) -> bool:
    """Whether all are ordinary strided tensors on the current GPU, and nothing traces or transforms the call."""
    if torch.compiler.is_compiling():
        current = torch.cuda.current_device()
        return all([isinstance(t, torch.Tensor) and t.is_cuda and t.get_device() == current for t in tensors])
    kinds, strided = (torch.Tensor, torch.nn.Parameter), torch.strided
    for t in tensors:
        # Fake tensors, DTensors and similar classes have no memory that a kernel can read.
        if type(t) not in kinds or t.layout is not strided or t.is_nested or t.is_neg() or not t.is_cuda:
            return False
    devices = {t.get_device() for t in tensors}
    return len(devices) == 1 and _can_launch_on(devices.pop())
''',
    ARE_ACCEPTED: '''_ACCEPTED = {}


def _are_like_accepted(guard, tensors) -> bool:
    """Whether a guard accepted a call with tensors like these: classes, dtypes, shapes, strides, devices and modes."""
    # The function of torch.compile that compares them all at once ends the process for nested tensors.
    if torch.compiler.is_compiling() or any([getattr(t, "is_nested", True) for t in tensors]):
        return False
    for device, accepted in _ACCEPTED.get(guard, ()):
        if accepted.check(*tensors):
            return _can_launch_on(device)
    return False
''',
    ACCEPT: '''def _accept(guard, tensors) -> bool:
    """Note that a guard accepts tensors like these, the newest first."""
    if not torch.compiler.is_compiling():
        like = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        _ACCEPTED[guard] = [(torch.cuda.current_device(), like), *_ACCEPTED.get(guard, [])[:7]]
    return True
''',
    NO_OVERLAP: '''_OVERLAP_RESULTS = {}


def _do_not_overlap(tensors, updated) -> bool:
    """Whether none of the first ``updated`` tensors, which are written, shares memory with another tensor.

    A module passes the same tensors in nearly every call, so recent results are cached.
    """
    extents = [t.nbytes if t.is_contiguous() else (t.shape, t.stride(), t.dtype) for t in tensors]
    key = (updated, *[t.data_ptr() for t in tensors], *extents)
    result = _OVERLAP_RESULTS.get(key)
    if result is None:
        result = True
        end_of_all = end_of_updated = 0  # end addresses of all previous tensors, and of the updated ones
        for start, i in sorted([(t.data_ptr(), i) for i, t in enumerate(tensors)]):
            t = tensors[i]
            elements = t.numel() if t.is_contiguous() else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
            if start < (end_of_all if i < updated else end_of_updated):
                result = False
                break
            end = start + elements * t.itemsize
            end_of_all = max(end_of_all, end)
            if i < updated:
                end_of_updated = max(end_of_updated, end)
        if len(_OVERLAP_RESULTS) >= 16:
            _OVERLAP_RESULTS.clear()
        _OVERLAP_RESULTS[key] = result
    return result
''',
    HAS_CLASS: '''def _has_class(module, kind) -> bool:
    """Whether a module has this class, or the subclass that FSDP2 (fully_shard) gives it."""
    fsdp = getattr(torch.distributed, "fsdp", None)  # loaded where it is used
    return type(module) is kind or (
        hasattr(fsdp, "FSDPModule") and type(module).__bases__ == (fsdp.FSDPModule, kind)
    )
''',
    IS_UNCHANGED_MODULE: '''def _is_unchanged_module(module, kind, length=None) -> bool:
    """Whether a call of the module runs only the forward of its class: same class, no hooks, no patched forward."""
    return (
        (type(module) is kind or f"{type(module).__module__}.{type(module).__qualname__}" == kind)
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
        and (length is None or len(module) == length)
    )
''',
    ARE_UNCHANGED_MODULES: '''def _are_unchanged_modules(kind, indices, *modules) -> bool:
    """Whether calls of the modules run only the forward of their class: same class, no hooks, no patched forward.

    Lists have these indices, in this order, so that their modules can be read from their dictionaries.
    """
    known, keys = kind, [str(index) for index in indices or ()]
    for module in modules:
        if type(module) is not known:
            if f"{type(module).__module__}.{type(module).__qualname__}" != kind:
                return False
            known = type(module)
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            return False
        if indices is not None and [*module._modules] != keys:
            return False
    return True
''',
    HAS_CAPTURED_HOOKS: '''def _has_captured_hooks(module, kind, before, after) -> bool:
    """Whether a call of the module runs the forward of its class and these hooks, whose effect the kernels have."""

    def known(hook):
        if type(hook) is type(_has_captured_hooks):
            return hook
        return f"{type(hook).__module__}.{type(hook).__qualname__}", getattr(hook, "__dict__", None)

    return (
        (type(module) is kind or f"{type(module).__module__}.{type(module).__qualname__}" == kind)
        and "forward" not in module.__dict__
        and [known(hook) for hook in module._forward_pre_hooks.values()] == before
        and [known(hook) for hook in module._forward_hooks.values()] == after
    )
''',
    HAVE_TYPE_AND_SHAPE: '''def _are_contiguous_with(dtype, shape, *tensors) -> bool:
    """Whether all tensors are contiguous and have this dtype and shape."""
    for t in tensors:
        if t.dtype != dtype or t.shape != shape or not t.is_contiguous():
            return False
    return True
''',
    HAS_ITEMS: '''def _has_items(actual, expected) -> bool:
    """Whether nested lists have these values, with the same types; a tuple may replace a list."""
    if not isinstance(expected, list):
        return type(actual) is type(expected) and actual == expected
    if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
        return False
    return all([_has_items(item, value) for item, value in zip(actual, expected)])
''',
    HAVE_VALUES: '''def _dictionaries_hold(values, modules) -> bool:
    """Whether the dictionaries of all modules hold these values, each with its type; lists stand for tuples.

    One attribute of all modules is read at a time, which is faster. False proves nothing: attributes may be computed.
    """
    for kind in {*map(type, modules)}:
        if not issubclass(kind, torch.nn.Module) or kind.__getattr__ is not torch.nn.Module.__getattr__:
            return False
        if kind.__getattribute__ is not object.__getattribute__ or any([hasattr(kind, name) for name in values]):
            return False
    stored = [module.__dict__ for module in modules]
    for name, value in values.items():
        held = [own[name] if name in own else own["_parameters"].get(name, own) for own in stored]
        expected = tuple(value) if isinstance(value, list) else value
        if {*map(type, held)} != {type(expected)} or held.count(expected) != len(held):
            return False
    return True


def _have_values(values, *modules) -> bool:
    """Whether the attributes of all modules have these values and types; a tuple may replace a list."""
    if not torch.compiler.is_compiling() and _dictionaries_hold(values, modules):
        return True
    for module in modules:
        for name, value in values.items():
            actual = getattr(module, name, module)  # a missing attribute gives the module, which never matches
            if isinstance(value, list):
                if not isinstance(actual, (list, tuple)) or [*actual] != value:
                    return False
            elif type(actual) is not type(value) or actual != value:
                return False
    return True
''',
    REPORTED: '''def _reported(guard):
    """The guard; under MTMC_GUARD=warn, with warnings of the first call that it refuses for each reason."""
    import os

    if os.environ.get("MTMC_GUARD") == "warn":
        from mtmc_lsp.guard.worker import misses

        return misses.reported(guard)
    return guard
''',
    HAVE_NUMBER_TYPES: '''def _have_number_types(compute, *kinds) -> bool:
    """Whether Python computes these numbers without an error, and they have these types."""
    try:
        return [type(number) for number in compute()] == [*kinds]
    except (ArithmeticError, ValueError):
        return False
''',
}
"""Source of each guard helper, by name.

A file may contain blocks of earlier versions, and the last definition of a name counts for all blocks. Therefore a helper
that checks more than before gets another name.
"""
