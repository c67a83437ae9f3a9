"""Class methods as targets: their kernels run for the class itself, while its attributes are as captured."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch

from mtmc_lsp.process.module_files import load_file
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

TEXT = """import torch

class Config:
    power = 1.0

    def __init__(self):
        self.shift = 1.0

class Ops:
    scale = 2.0
    config = Config()

    # mtmc: x=f32[B,16] B=8
    @classmethod
    def scaled(cls, x):
        return cls.soft(x) * cls.scale + cls.config.shift

    @classmethod
    def soft(cls, x):
        return torch.softmax(x, -1)

class Others(Ops):
    scale = 5.0
"""


def test_a_class_method_that_calls_another_and_reads_the_class_is_verified(captured) -> None:
    capture = captured(TEXT, "Ops.scaled")
    candidate = fully_fused(capture, start(capture, TEXT))
    assert "def ops_scaled_fits(cls, x)" in candidate.source
    assert "cls is Ops" in candidate.source
    assert verified(capture, candidate).reason == ""


def _loaded(text: str, folder: Path, name: str) -> ModuleType:
    file = folder / f"{name}.py"
    file.write_text(text)
    return load_file(file)


def test_subclasses_and_changed_attributes_run_the_users_code(captured, tmp_path: Path, monkeypatch) -> None:
    """The kernels are replaced by a function that would give another result."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    capture = captured(TEXT, "Ops.scaled")
    candidate = fully_fused(capture, start(capture, TEXT))
    module = _loaded(on_cpu(candidate.source, TEXT), tmp_path, "class_methods")
    launches: list[torch.Tensor] = []
    module.ops_scaled_launch = lambda x: launches.append(x) or torch.zeros_like(x)
    x = torch.randn(8, 16)
    with torch.no_grad():
        assert torch.equal(module.Ops.scaled(x), torch.zeros_like(x))
        assert len(launches) == 1
        assert torch.equal(module.Others.scaled(x), torch.softmax(x, -1) * 5.0 + 1.0)
        module.Ops.scale = 3.0
        assert torch.equal(module.Ops.scaled(x), torch.softmax(x, -1) * 3.0 + 1.0)
        module.Ops.scale = 2.0
        module.Ops.config.shift = 0.5
        assert torch.equal(module.Ops.scaled(x), torch.softmax(x, -1) * 2.0 + 0.5)
        module.Ops.config.shift = 1.0
        module.Ops.soft = classmethod(lambda cls, x: x)
        assert torch.equal(module.Ops.scaled(x), x * 2.0 + 1.0)
    assert len(launches) == 1
