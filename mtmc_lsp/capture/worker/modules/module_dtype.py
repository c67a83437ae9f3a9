"""The dtype of a module that the workload leaves open, from the dtype of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mtmc_lsp.core.dtypes import is_float, short_dtype
from mtmc_lsp.core.errors import MtmcError, TargetRaises, TargetUnsupported
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Capture, Workload

HALF = ("float16", "bfloat16")


def with_module_dtype(capture: Callable[[Workload], Capture], workload: Workload) -> Capture:
    """Capture a workload. If its module fails as constructed and all float arguments have one half dtype, try that dtype.

    Raises:
        MtmcError: as ``capture`` does, with the directive's word in the remedy where dtypes may be the reason.
    """
    dtype = argument_dtype(workload)
    if not workload.target.class_name or workload.module.dtype or dtype not in HALF:
        return capture(workload)
    kind = workload.target.class_name
    word = f"module={short_dtype(dtype)}"
    try:
        result = capture(workload)
    except (TargetRaises, TargetUnsupported) as error:
        try:
            result = capture(replace(workload, module=replace(workload.module, dtype=dtype)))
        except MtmcError:
            error.remedy += f" If the parameters of {kind} are {dtype}, write {word} in the directive."
            raise error from None
        note = f"the parameters of {kind} are {dtype} ({word}), because it fails on {dtype} arguments as constructed"
    else:
        if not any(i.kind is InputKind.PARAMETER and i.type.dtype == "float32" for i in result.graph.inputs):
            return result
        note = (
            f"{kind} has float32 parameters and {dtype} arguments; write {word} in the directive if it runs in {dtype}"
        )
    return replace(result, workload=replace(result.workload, assumed=(*result.workload.assumed, note)))


def argument_dtype(workload: Workload) -> str:
    """The dtype of all floating-point tensors among the arguments; empty if there are several, or none."""
    tensors = [spec.tensor for spec in workload.arguments if spec.tensor is not None]
    dtypes = {tensor.dtype for tensor in tensors if is_float(tensor.dtype)}
    return dtypes.pop() if len(dtypes) == 1 else ""
