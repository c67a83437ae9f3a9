"""A run's last good version as a self-contained KernelBench file: ``class ModelNew`` with its inputs."""

from __future__ import annotations

import re

from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.run import RunResult
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import ArgumentSpec, TargetKind, TensorSpec, WorkloadSource


def kernelbench(result: RunResult) -> str:
    """The file's text: the optimised source, ``ModelNew`` and, unless it has them, ``get_inputs`` and ``get_init_inputs``."""
    text = re.sub(r"[ \t]*# mtmc: (begin|end) .*\n|  # mtmc: dispatch", "", result.final.source)
    target = result.target
    if target.kind is TargetKind.KERNEL:
        raise RequestError("a Triton kernel has no KernelBench form", remedy="Export the function that launches it.")
    if target.kind is TargetKind.FUNCTION:
        model = _function_model(result)
    else:
        name = target.class_name
        if "." in name:
            raise RequestError(f"{name} is inside another definition", remedy="Move the class to the top of the file.")
        model = f"\n\nclass ModelNew({name}):\n    pass\n" if name != "Model" else "\n\nModelNew = Model\n"
    inputs = "" if result.workload.source is WorkloadSource.GET_INPUTS else _inputs(result)
    return text.rstrip("\n") + "\n" + model + inputs


def _function_model(result: RunResult) -> str:
    names = [argument.name for argument in result.workload.arguments if argument.tensor is not None]
    fixed = [f"{a.name}={a.constant!r}" for a in result.workload.arguments if a.tensor is None]
    call = ", ".join([*(f"{name}={name}" for name in names), *fixed])
    return (
        "\n\nclass ModelNew(torch.nn.Module):\n"
        f"    def forward(self, {', '.join(names)}):\n"
        f"        return {result.target.qualname}({call})\n"
    )


def _inputs(result: RunResult) -> str:
    sizes = result.workload.sizes
    made = [_tensor(a.tensor, dict(sizes)) for a in result.workload.arguments if a.tensor is not None]
    init = [_value(argument) for argument in result.workload.init_arguments]
    lines = "".join(f"        {text},\n" for text in made)
    return (
        f"\n\ndef get_inputs():\n    return [\n{lines}    ]\n"
        f"\n\ndef get_init_inputs():\n    return [[], {{{', '.join(init)}}}]\n"
    )


def _value(argument: ArgumentSpec) -> str:
    return f"{argument.name!r}: {argument.constant!r}"


def _tensor(spec: TensorSpec, sizes: dict[str, int]) -> str:
    shape = ", ".join(str(Size.of(size).value(sizes)) for size in spec.shape)
    if spec.dtype == "bool":
        return f"torch.rand({shape}) < 0.5"
    if spec.dtype.startswith(("int", "uint")):
        low, high = int(spec.low or 0), int(spec.high if spec.high is not None else 1)
        return f"torch.randint({low}, {high + 1}, ({shape},), dtype=torch.{spec.dtype})"
    text = f"torch.randn({shape}, dtype=torch.{spec.dtype})"
    return f"{text}.as_strided(({shape},), {tuple(s.value(sizes) for s in spec.stride)})" if spec.stride else text
