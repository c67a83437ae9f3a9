"""Writes a failing case as a file that runs by itself, with torch and Triton alone. Runs in workers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from mtmc_lsp.capture.accesses import dotted
from mtmc_lsp.capture.worker.autocast import gpu_rules
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Capture, CapturedArgument, ContainerKind, is_torch_name
from mtmc_lsp.process.project_files import make_folder, writing
from mtmc_lsp.verify.cases import AUTOGRAD, VALUES, Case
from mtmc_lsp.verify.error_limits import FACTORS
from mtmc_lsp.verify.messages import NO_ARGUMENTS, CandidateSource, ReproduceAnswer, ReproduceRequest
from mtmc_lsp.verify.worker.interpreter import bfloat16, patches
from mtmc_lsp.verify.worker.interpreter.source import GPU_TO_CPU
from mtmc_lsp.verify.worker.reference_commands import inputs_of
from mtmc_lsp.verify.worker.run_target import UPSTREAM, copies, is_interpreted

MAX_TEXT_ELEMENTS = 4096
"""Limit for tensors that are written as text; larger ones go to a separate file."""
AUTOCAST_STATE = ("torch.is_autocast_enabled()", 'torch.is_autocast_enabled("cpu")')
"""What guards ask for on a GPU, and on a CPU."""
TEMPLATE = Path(__file__).with_name("reproduction.txt")
GRADIENTS_TEMPLATE = Path(__file__).with_name("reproduction_gradients.txt")


def reproduce(request: ReproduceRequest) -> ReproduceAnswer:
    """Write the file; next to it, large tensors, and the candidate if it is a version of the user's file."""
    data, path = request.data, Path(request.path)
    capture, interpreted = data.call, is_interpreted()
    inputs = copies({name: tensor.cpu() for name, tensor in inputs_of(data)[1].items()})
    make_folder(path.parent)
    target = capture.workload.target
    init, named = data.init or NO_ARGUMENTS, {spec.name: spec.constant for spec in capture.workload.init_arguments}
    values = {
        "REASON": request.reason.replace("\\", "/").replace('"""', "'''"),
        "CASE": data.case.text(capture.graph),
        "INTERPRET": 'os.environ["TRITON_INTERPRET"] = "1"  # no GPU is needed' if interpreted else "",
        "REFERENCE": repr((target.path, target.qualname)),
        "CANDIDATE": repr(_candidate(capture, request.candidate, path)),
        "REWRITTEN": repr((*GPU_TO_CPU, AUTOCAST_STATE) if interpreted else ()),
        "TENSORS": _tensors(inputs, path.with_suffix(".pt")),
        "LEAVES": _leaves(capture),
        "ARGUMENTS": _arguments(capture),
        "HELD": _parameters(capture),
        "INIT": f"{init}[0], {{**{init}[1], **{named!r}}}",
        "PATCH": _patches(inputs, request.candidate.text, capture.workload.autocast) if interpreted else "",
        "CALLS": str(request.calls),
        **_gradients(capture, data.case),
        "SEED": str(data.case.seed),
        "FACTOR": str(FACTORS[request.precision]),
        "DEVICE": repr("cpu" if interpreted else capture.workload.device),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    with writing(path) as stream:
        stream.write(text.encode())
    return ReproduceAnswer(str(path))


def _candidate(capture: Capture, candidate: CandidateSource, path: Path) -> tuple[str, str]:
    """The path and the qualified name of the candidate; a version of the user's file is written next to the reproduction."""
    if candidate.separate is not None:
        return candidate.separate.target.path, candidate.separate.target.qualname
    version = path.with_name(f"{path.stem}_version.py")
    version.write_text(candidate.text, encoding="utf-8")
    return str(version), capture.workload.target.qualname


def _tensors(inputs: dict[str, torch.Tensor], data: Path) -> str:
    """An expression for the inputs by name; large ones are saved to ``data``."""
    if sum(tensor.numel() for tensor in inputs.values()) > MAX_TEXT_ELEMENTS:
        torch.save(inputs, data)
        return f"torch.load(pathlib.Path(__file__).with_name({data.name!r}), weights_only=True)"
    data.unlink(missing_ok=True)
    return "{\n" + "".join(f"    {name!r}: {_tensor(value)},\n" for name, value in inputs.items()) + "}"


def _passed(capture: Capture) -> list[CapturedArgument]:
    """The arguments that are passed. Defaults are not: the candidate may lack these parameters."""
    specified = [spec.name for spec in capture.workload.arguments]
    return [a for a in capture.arguments if a.name in specified or any(leaf.input for leaf in a.leaves)]


def _gradients(capture: Capture, case: Case) -> dict[str, str]:
    """How a call is made and what it returns; with code for gradients only if the case compares them."""
    backward = capture.graph.backward if case.kind == VALUES else None
    if backward is None and case.kind != AUTOGRAD:
        return {"GRADIENTS": "", "GRADIENT_MODE": f"torch.no_grad(){_autocast(capture)}:", "RESULTS": "results"}
    trained, form = None, 0
    if backward is not None:
        trained = [leaf.name for leaf in capture.leaves if leaf.input in backward.gradients]
        form = case.seed % len(UPSTREAM)
    code = GRADIENTS_TEMPLATE.read_text(encoding="utf-8")
    return {
        "GRADIENTS": code.replace("@TRAINED@", repr(trained)).replace("@FORM@", str(form)),
        "GRADIENT_MODE": f"torch.enable_grad(){_autocast(capture)}:\n        leaves = trained(function, values)",
        "RESULTS": "with_gradients(results, leaves)",
    }


def _autocast(capture: Capture) -> str:
    """The caller's autocast as a further context; under the interpreter that of a CPU."""
    dtype = capture.workload.autocast
    device = "cpu" if is_interpreted() else capture.workload.device
    return f', torch.autocast("{device}", torch.{dtype})' if dtype else ""


def _leaves(capture: Capture) -> str:
    """An expression for the tensors and constants in the arguments, by path."""
    lines = [
        f"    {leaf.name!r}: {f'TENSORS[{leaf.input!r}]' if leaf.input else constant_text(leaf.constant)},\n"
        for argument in _passed(capture)
        for leaf in argument.leaves
    ]
    return "{\n" + "".join(lines) + "}"


def constant_text(constant: object) -> str:
    """The constant of an argument as Python."""
    return str(constant) if is_torch_name(constant) else repr(constant)


def _arguments(capture: Capture) -> str:
    """An expression for the arguments by name, in terms of ``leaves`` and of the classes in ``file``."""
    lines = [f"        {_key(argument)!r}: {_argument(argument)},\n" for argument in _passed(capture)]
    return "{\n" + "".join(lines) + "    }"


def _key(argument: CapturedArgument) -> str:
    """The name of an argument, with the stars of ``*args`` and ``**kwargs``."""
    stars = {ContainerKind.POSITIONAL: "*", ContainerKind.KEYWORDS: "**"}
    return (stars.get(argument.container.kind, "") if argument.container is not None else "") + argument.name


def _argument(argument: CapturedArgument) -> str:
    container = argument.container
    if container is None:
        return f"leaves[{argument.name!r}]"
    named = replace(container, class_name=f"file.{container.class_name}" if container.class_name else "")
    return named.expression([_argument(item) for item in argument.items])


def _parameters(capture: Capture) -> str:
    """An expression for the parameters and buffers by name."""
    inputs = [item for item in capture.graph.inputs if item.kind is not InputKind.ARGUMENT]
    return "{\n" + "".join(f"    {dotted(i.access)!r}: TENSORS[{i.name!r}],\n" for i in inputs) + "}"


def _patches(inputs: Mapping[str, torch.Tensor], candidate: str, autocast: str) -> str:
    """The code of our interpreter patches without the modules' heads; that of bfloat16 and of autocast where they are used."""
    text = inspect.getsource(patches)
    code = f"\nimport contextlib\nimport importlib\n\n{text[text.index('SAME_NAME') :]}\n\npatch_interpreter()\n"
    if "bfloat16" in candidate or any(tensor.dtype is torch.bfloat16 for tensor in inputs.values()):
        text = inspect.getsource(bfloat16)
        code += f"\n\n{text[text.index('NAME =') :]}\n\npatch_bfloat16()\n"
    if autocast:
        text = inspect.getsource(gpu_rules)
        imports = "import warnings\nfrom functools import lru_cache\nfrom collections.abc import Callable, Iterable\n\n"
        code += f"\n\n{imports}{text[text.index('LOWER_PRECISION =') :]}\n\n# The casts that CUDA's autocast makes.\ninstall()\n"
    return code


def _tensor(value: torch.Tensor) -> str:
    shape, stride = tuple(value.shape), tuple(value.stride())
    return f"laid_out({value.tolist()!r}, {value.dtype}, {shape}, {stride})"
