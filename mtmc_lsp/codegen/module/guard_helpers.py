"""Functions that guards call, as they are written into the user's file."""

from __future__ import annotations

PLAIN_CALL = "_is_plain_call"
OWN_MODULE = "_is_unchanged"
APART = "_lie_apart"
LIE_HERE = "_lie_here"
ALL_ARE = "_all_are"
ALL_HAVE = "_all_have"
ALIGNED = "_are_aligned"
GUARD_HELPERS = {
    ALIGNED: '''def _are_aligned(tensors) -> bool:
    """Whether tensors begin at multiples of 16 bytes, as hardware that moves whole tiles of them asks; a compiler cannot tell."""
    return not torch.compiler.is_compiling() and all(t.data_ptr() % 16 == 0 for t in tensors)
''',
    PLAIN_CALL: '''def _is_plain_call(tensors) -> bool:
    """Whether these are tensors with memory of their own, and no tracing, vmap or forward gradient follows the call."""
    kinds, strided = (torch.Tensor, torch.nn.Parameter), torch.strided
    for t in tensors:
        if type(t) not in kinds or t.layout is not strided or t.is_nested or t.is_neg():
            return False
    return (
        torch.autograd.forward_ad._current_level < 0
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
    )
''',
    APART: '''_APART = {}


def _lie_apart(tensors, changed) -> bool:
    """Whether no tensor's memory overlaps that of one of the first ``changed``, which are written into.

    Of a network's tensors it is the same at nearly every call, so what was found last is remembered.
    """
    key = (changed, *[(t.data_ptr(), t.nbytes if t.is_contiguous() else (t.shape, t.stride(), t.dtype)) for t in tensors])
    found = _APART.get(key)
    if found is None:
        found = True
        reached = written = 0  # the ends of all before, and of those among them that are written into
        for start, i in sorted([(t.data_ptr(), i) for i, t in enumerate(tensors)]):
            t = tensors[i]
            elements = t.numel() if t.is_contiguous() else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
            if start < (reached if i < changed else written):
                found = False
                break
            end = start + elements * t.itemsize
            reached = max(reached, end)
            if i < changed:
                written = max(written, end)
        if len(_APART) >= 16:
            _APART.clear()
        _APART[key] = found
    return found
''',
    OWN_MODULE: '''def _is_unchanged(module, kind, length=None) -> bool:
    """Whether calling the module runs its class's own forward alone: no other class, hook or patched method."""
    return (
        (type(module) is kind or f"{type(module).__module__}.{type(module).__qualname__}" == kind)
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
        and (length is None or len(module) == length)
    )
''',
    LIE_HERE: '''def _lie_here(tensors) -> bool:
    """Whether all are tensors that lie dense on the present GPU, where Triton launches."""
    for t in tensors:
        if not (isinstance(t, torch.Tensor) and t.is_cuda and t.is_contiguous()):
            return False
    here = torch.cuda.current_device()
    return all([t.get_device() == here for t in tensors])
''',
    ALL_ARE: '''def _all_are(dtype, shape, *tensors) -> bool:
    """Whether each tensor has this dtype and shape."""
    for t in tensors:
        if t.dtype != dtype or t.shape != shape:
            return False
    return True
''',
    ALL_HAVE: '''def _all_have(values, *modules) -> bool:
    """Whether attributes of each module have these values, of the same type; a tuple may stand for a list."""
    for module in modules:
        for name, value in values.items():
            own = getattr(module, name, module)  # which is no such value, where there is none
            if isinstance(value, list):
                if not isinstance(own, (list, tuple)) or [*own] != value:
                    return False
            elif type(own) is not type(value) or own != value:
                return False
    return True
''',
}
"""Functions that guards call, by name."""
