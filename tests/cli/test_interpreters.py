"""Runs under the user's own interpreter, where nothing of ours is installed, on projects laid out as people lay them out."""

from __future__ import annotations

import importlib.metadata as metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runner import environment, mtmc

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

NOTHING_OF_OURS = """\
import importlib.util

for name in ("tree_sitter", "typer", "rich"):
    assert importlib.util.find_spec(name) is None, name
"""


def needed(*names: str) -> set[str]:
    """Names of packages with all that they need."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = re.split(r"[\s;<>=!~\[(]", pending.pop(), maxsplit=1)[0]
        if name.lower() in found:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            # Only needed on another system.
            continue
        found.add(name.lower())
        pending += [text for text in requirements if "extra ==" not in text]
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another environment: it has torch, triton and jaxtyping, and nothing of ours."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    for name in needed("torch", "triton", "numpy", "jaxtyping"):
        for file in metadata.files(name) or []:
            top = file.parts[0]
            if top != ".." and "__pycache__" not in top and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    assert not (packages / "tree_sitter").exists()
    return str(folder / "bin" / "python")


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


PACKAGE = {
    "pyproject.toml": "[project]\nname = 'user'\n",
    "src/shapes/__init__.py": "from .model import Block\n",
    "src/shapes/parts/__init__.py": "",
    "src/shapes/parts/gates.py": "import torch\n\n\ndef gate(x):\n    return torch.sigmoid(x) * x\n",
    "src/shapes/model.py": NOTHING_OF_OURS
    + """
import torch
from torch import nn

from .parts.gates import gate
from .parts import gates


# mtmc: x=f32[8,48] init: width=48
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return torch.softmax(gate(x) * self.weight + gates.gate(x), -1)


if __name__ == "__main__":
    raise SystemExit("this file is never run as a program")
""",
}
SIBLINGS = {
    "model.py": NOTHING_OF_OURS
    + """
import torch

from helpers import shifted
import tools.scale


# mtmc: x=f32[8,48]
def f(x):
    return torch.softmax(shifted(x) * tools.scale.FACTOR, -1)


if __name__ == "__main__":
    raise SystemExit("this file is never run as a program")
""",
    "helpers.py": "def shifted(x):\n    return x + 1\n",
    "tools/scale.py": "FACTOR = 2.0\n",
}
TYPED = {
    "model.py": NOTHING_OF_OURS
    + """
import torch
from jaxtyping import Float, jaxtyped
from torch import Tensor


# mtmc: batch=8 dim=48
def f(x: Float[Tensor, "batch dim"], weight: Float[Tensor, " dim"], eps: float = 1e-6) -> Float[Tensor, "batch dim"]:
    return torch.softmax(x * weight + eps, -1)
""",
}
KERNELBENCH = {  # their names start with numbers
    "level1/1_scaled_softmax.py": NOTHING_OF_OURS
    + """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x) * self.scale, dim=1)


batch_size = 8
dim = 48


def get_inputs():
    return [torch.rand(batch_size, dim)]


def get_init_inputs():
    return [2.0]
""",
}


@pytest.mark.parametrize(
    ("files", "spec", "source"),
    [
        (PACKAGE, "src/shapes/model.py::Block", "directive"),
        (SIBLINGS, "model.py::f", "directive"),
        (TYPED, "model.py::f", "annotations"),
        (KERNELBENCH, "level1/1_scaled_softmax.py::Model", "get_inputs"),
    ],
    ids=["src layout, relative imports", "sibling modules", "jaxtyping", "KernelBench"],
)
def test_a_whole_run_under_another_environment(
    files: dict[str, str], spec: str, source: str, python: str, tmp_path: Path
) -> None:
    write(tmp_path, files)
    answer = mtmc(tmp_path, "optimize", spec, "--python", python, "--arch", "sm_90", "--apply", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    assert answer.document["workload"]["source"] == source
    assert answer.document["status"] == "unmeasured"
    path = spec.partition("::")[0]
    written = (tmp_path / path).read_text()
    assert "@triton.jit" in written
    # What was written imports in the user's environment too, as a package where it is one.
    folder, module = (
        (tmp_path / "src", "shapes.model") if "src/" in path else ((tmp_path / path).parent, Path(path).stem)
    )
    importing = [python, "-c", f"import importlib; importlib.import_module({module!r})"]
    subprocess.run(importing, cwd=folder, env=bare(), check=True)


def bare() -> dict[str, str]:
    return {name: value for name, value in environment().items() if name != "PYTHONPATH"}


def test_a_program_is_recorded_under_another_environment(python: str, tmp_path: Path) -> None:
    write(tmp_path, {**SIBLINGS, "run.py": "import torch\nimport model\nmodel.f(torch.ones(4, 6))\n"})
    answer = mtmc(tmp_path, "record", "--json", "--", python, "run.py")
    assert answer.code == 0, answer.err
    assert {target["qualname"] for target in answer.document["targets"]} == {"f", "shifted"}


def test_a_package_that_the_environment_lacks_is_named_at_the_line_that_imports_it(python: str, tmp_path: Path) -> None:
    write(tmp_path, {"model.py": "import torch\nimport typer\n\n\n# mtmc: x=f32[8]\ndef f(x):\n    return x + 1\n"})
    answer = mtmc(tmp_path, "optimize", "model.py::f", "--python", python, "--json", **NO_GPU)
    assert answer.code == 2
    assert "No module named 'typer'" in answer.error["message"]
    assert answer.error["line"] == 2
    assert python in answer.error["remedy"]
