"""Writes a failing case as a file that runs by itself, with torch and triton alone. Runs in workers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.workload import Target
from mtmc_lsp.process.project_files import make_folder, writing
from mtmc_lsp.process.worker.tensor_ipc import take
from mtmc_lsp.verify.cases import AUTOGRAD
from mtmc_lsp.verify.worker.comparison.compare import FACTORS
from mtmc_lsp.verify.worker.interpreter import patches as mending
from mtmc_lsp.verify.worker.interpreter.source import BFLOAT16_TO_FLOAT32, GPU_TO_CPU
from mtmc_lsp.verify.worker.run_target import capture_of, copies, is_interpreted

MOST_IN_TEXT = 4096
"""Elements that are written as text; more go to a file beside."""
TEMPLATE = Path(__file__).with_name("reproduction.txt")


def reproduce(request: dict[str, Any]) -> dict[str, Any]:
    """Write the file, and what it needs; gives their paths."""
    capture, target = capture_of(request), from_json(Target, request["target"])
    inputs = copies(take(request["inputs"], "cpu"))
    path = Path(request["path"])
    make_folder(path.parent)
    data = path.with_suffix(".pt")
    if sum(tensor.numel() for tensor in inputs.values()) > MOST_IN_TEXT:
        with writing(data) as stream:
            torch.save(inputs, stream)
        tensors = f"torch.load(pathlib.Path(__file__).with_name({data.name!r}), weights_only=True)"
    else:
        data.unlink(missing_ok=True)
        lines = [f"    {name!r}: {_tensor(value)},\n" for name, value in inputs.items()]
        tensors = "{\n" + "".join(lines) + "}"
    own = capture.workload.target
    given = [spec.name for spec in capture.workload.arguments]
    arguments = [
        f"    {a.name!r}: {f'TENSORS[{a.input!r}]' if a.input else repr(a.constant)},\n"
        for a in capture.arguments
        if a.input or a.name in given
    ]
    held = [
        f"    {i.access.removeprefix('self.').replace('[', '.').replace(']', '')!r}: TENSORS[{i.name!r}],\n"
        for i in capture.graph.inputs
        if i.kind is not InputKind.ARGUMENT
    ]
    init = {spec.name: spec.constant for spec in capture.workload.init_arguments}
    values = {
        "REASON": request["reason"].replace("\\", "/").replace('"""', "'''"),
        "CASE": request["case"]["label"],
        "INTERPRET": 'os.environ["TRITON_INTERPRET"] = "1"  # no GPU is needed' if is_interpreted() else "",
        "REFERENCE": repr((own.path, own.qualname)),
        "CANDIDATE": repr((target.path, target.qualname)),
        "REWRITTEN": repr(GPU_TO_CPU + BFLOAT16_TO_FLOAT32 if is_interpreted() else ()),
        "WIDENED": repr(BFLOAT16_TO_FLOAT32 if is_interpreted() else ()),
        "TENSORS": tensors,
        "ARGUMENTS": "{\n" + "".join(arguments) + "}",
        "HELD": "{\n" + "".join(held) + "}",
        "INIT": f"{request['init']}[0], {{**{request['init']}[1], **{init!r}}}",
        "MEND": _mended() if is_interpreted() else "",
        "CALLS": str(request["calls"]),
        "GRADIENTS": str(request["case"]["kind"] == AUTOGRAD),
        "SEED": str(request["case"]["seed"]),
        "FACTOR": str(FACTORS[request["precision"]]),
        "DEVICE": repr("cpu" if is_interpreted() else capture.workload.device),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    with writing(path) as stream:
        stream.write(text.encode())
    return {"path": str(path)}


def _mended() -> str:
    """Our own mending of the interpreter, without what stands above its code."""
    text = inspect.getsource(mending)
    return f"\nimport contextlib\nimport importlib\n\n{text[text.index('SAME_NAME') :]}\n\nmend_interpreter()\n"


def _tensor(value: torch.Tensor) -> str:
    shape, stride = tuple(value.shape), tuple(value.stride())
    return f"laid_out({value.tolist()!r}, {value.dtype}, {shape}, {stride})"
