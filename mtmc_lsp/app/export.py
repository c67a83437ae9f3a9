"""A run's last accepted version as a self-contained KernelBench file: ``class ModelNew`` with its inputs."""

from __future__ import annotations

import re

from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.run import Placement, RunResult, StepStatus
from mtmc_lsp.core.workload import ArgumentSpec, ContainerKind, TargetKind, TensorSpec, WorkloadSource, leaves_of
from mtmc_lsp.source.compose import strip_generated

REFERENCE = "Model"
"""The name of the user's code in KernelBench's format."""
FURTHER = (ContainerKind.POSITIONAL, ContainerKind.KEYWORDS)
MARKS = re.compile(r"[ \t]*# mtmc: (begin|end) .*(\n|\Z)|  # mtmc: (dispatch|import)")


def kernelbench(result: RunResult) -> str:
    """The file's text: the optimized source, ``ModelNew`` and, if they are missing, the functions that make its inputs.

    Raises:
        RequestError: the run accepted no step, or its target has no KernelBench form.
    """
    _check(result)
    text = MARKS.sub("", result.final.source).rstrip("\n") + "\n"
    if result.target.class_name:
        # The guard refuses subclasses, since they may change anything; ``ModelNew`` changes nothing.
        kind = result.target.class_name
        text = text.replace(f"type(self) is {kind}\n", f"type(self) in ({kind}, ModelNew)\n")
        trained = f"_has_class(self, {kind})"
        text = text.replace(f"{trained}\n", f"({trained} or type(self) is ModelNew)\n")
    if result.workload.source is WorkloadSource.GET_INPUTS:
        return text + _plain_model(result)
    return text + _model(result) + _inputs(result)


def kernelbench_reference(result: RunResult) -> str:
    """The text of the reference file: the user's code as ``class Model``, with the same inputs as the exported file.

    Raises:
        RequestError: as :func:`kernelbench`.
    """
    _check(result)
    plain = strip_generated(result.final.source.encode(), result.target.qualname).decode()
    text = MARKS.sub("", plain).rstrip("\n") + "\n"
    if result.workload.source is WorkloadSource.GET_INPUTS:
        return text if result.target.class_name == REFERENCE else text + _plain_model(result, REFERENCE)
    return text + _model(result, REFERENCE) + _inputs(result)


def _check(result: RunResult) -> None:
    target = result.target
    where = Location(target.path, target.start_line)
    if not any(step.status is StepStatus.ACCEPTED for step in result.steps):
        raise RequestError(
            f"run {result.id} accepted no step, so there is nothing to export",
            where=where,
            remedy="Export another run; see `mtmc runs`.",
        )
    if any(
        step.candidate.code.place is Placement.SIBLING
        for step in result.steps
        if step.candidate and step.candidate.code
    ):
        problem = f"the kernels of run {result.id} are written for a file of their own"
        raise RequestError(problem, where=where, remedy="Run mtmc optimize with --place end, and export that run.")
    if target.kind is TargetKind.KERNEL:
        remedy = "Export the function that launches it."
        raise RequestError("a Triton kernel has no KernelBench form", where=where, remedy=remedy)
    if "." in target.class_name:
        remedy = "Move the class to the top of the file."
        raise RequestError(f"{target.class_name} is inside another definition", where=where, remedy=remedy)
    if any(leaf.tensor is not None for leaf in leaves_of(result.workload.init_arguments)):
        remedy = "Give it get_inputs() and get_init_inputs()."
        raise RequestError("the constructor takes tensors", where=where, remedy=remedy)
    if any(a.container is not None and a.container.kind in FURTHER for a in result.workload.arguments):
        remedy = "Give each argument a parameter."
        raise RequestError("the call passes further arguments by *args or **kwargs", where=where, remedy=remedy)


def _method(result: RunResult) -> str:
    """The method that the target runs; empty for a function."""
    if result.target.kind is TargetKind.METHOD:
        return result.target.qualname.rpartition(".")[2]
    return "forward" if result.target.kind is TargetKind.MODULE else ""


def _plain_model(result: RunResult, kind: str = "ModelNew") -> str:
    """``ModelNew`` for a file that makes its own inputs."""
    name, method = result.target.class_name, _method(result)
    what = f"{name}." if kind == REFERENCE else f"{name}, by Triton kernels."
    lines = [f'    """{what}"""'] if method == "forward" else []
    if _is_frozen(result, kind):
        lines += [*([""] if lines else []), *_constructor(", *args, **kwargs", "*args, **kwargs", freezes=True)]
    if method != "forward":
        call = f"self.{method}" if name else result.target.qualname
        lines += [*([""] if lines else []), "    def forward(self, *inputs):", f"        return {call}(*inputs)"]
    return "\n".join([f"\n\nclass {kind}({name or 'torch.nn.Module'}):", *lines]) + "\n"


def _is_frozen(result: RunResult, kind: str) -> bool:
    """Whether the parameters require no gradients: evaluators time inference with gradients enabled, which kernels of a forward
    pass leave to the user's code."""
    return bool(result.target.class_name) and kind != REFERENCE and not result.workload.trains


def _constructor(parameters: str, passed_on: str, *, freezes: bool) -> list[str]:
    lines = [f"    def __init__(self{parameters}):", f"        super().__init__({passed_on})"]
    if freezes:
        lines += [
            "        # For inference: evaluators time it outside of torch.no_grad().",
            "        self.requires_grad_(False)",
        ]
    return lines


def _model(result: RunResult, kind: str = "ModelNew") -> str:
    """``ModelNew`` for a directive's workload: tensors by name, constants as they were."""
    name, method = result.target.class_name, _method(result)
    arguments = result.workload.arguments
    tensors = [_variable(path) for path in result.workload.tensors]
    passed = ", ".join(f"{argument.name}={_expression(argument)}" for argument in arguments)
    call = f"super().{method}" if name else result.target.qualname
    lines, freezes = [f"class {kind}({name or 'torch.nn.Module'}):"], _is_frozen(result, kind)
    if result.workload.init_arguments or freezes:
        init = result.workload.init_arguments
        parameters = "".join(f", {a.name}={_expression(a)}" for a in init)
        passed_on = ", ".join(f"{a.name}={a.name}" for a in init)
        lines += [*_constructor(parameters, passed_on, freezes=freezes), ""]
    lines += [f"    def forward(self, {', '.join(tensors)}):", f"        return {call}({passed})"]
    return "\n\n" + "\n".join(lines) + "\n"


def _variable(path: str) -> str:
    """A variable for a tensor: ``position_embeddings_0`` for ``position_embeddings[0]``."""
    return re.sub(r"\W+", "_", path).strip("_")


def _expression(argument: ArgumentSpec) -> str:
    if argument.container is not None:
        return argument.container.expression([_expression(item) for item in argument.items])
    return _variable(argument.name) if argument.tensor is not None else repr(argument.constant)


def _inputs(result: RunResult) -> str:
    inputs = [tensor_expression(spec, dict(result.workload.sizes)) for spec in result.workload.tensors.values()]
    lines = "".join(f"        {text},\n" for text in inputs)
    return f"\n\ndef get_inputs():\n    return [\n{lines}    ]\n\n\ndef get_init_inputs():\n    return []\n"


def tensor_expression(spec: TensorSpec, sizes: dict[str, int]) -> str:
    """The expression that makes the tensor."""
    shape = tuple(size.value(sizes) for size in spec.shape)
    if spec.stride is None:
        text = _values(spec, shape, sizes)
    else:
        # The memory from the first to the last element: several elements may be one in memory.
        strides = tuple(stride.value(sizes) for stride in spec.stride)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        text = f"{_values(spec, (extent,), sizes)}.as_strided({shape}, {strides})"
    return f"{text}.requires_grad_()" if spec.requires_grad else text


def _values(spec: TensorSpec, shape: tuple[int, ...], sizes: dict[str, int]) -> str:
    high = spec.high_size.value(sizes) if spec.high_size is not None else spec.high
    if spec.dtype == "bool":
        return f"(torch.rand({shape}) < 0.5)"
    if spec.dtype.startswith(("int", "uint")):
        most = int(high) if high is not None else 1
        return f"torch.randint({int(spec.low or 0)}, {most + 1}, {shape}, dtype=torch.{spec.dtype})"
    if high is not None:
        low = spec.low or 0.0
        return f"(torch.rand({shape}) * {high - low!r} + {low!r}).to(torch.{spec.dtype})"
    return f"torch.randn({shape}, dtype=torch.{spec.dtype})"
