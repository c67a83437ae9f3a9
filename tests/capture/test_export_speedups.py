"""The patched export gives the same programs as torch's, and leaves torch's state unchanged."""

from __future__ import annotations

import pytest
import torch
import torch._export.utils
import torch.nn.functional as F
from torch._subclasses import fake_impls
from torch.export import exported_program

from mtmc_lsp.capture.worker.export_speedups import speed_up_export
from mtmc_lsp.capture.worker.passes.decompositions import decompositions

MODULES = {
    "not decomposed": lambda x: torch.softmax(x, -1) + F.silu(x) @ x.mT,
    "decomposed": lambda x: F.cosine_similarity(x, torch.outer(x[0], x[1]), 0),
    "network": lambda x: F.layer_norm(F.linear(x, x, x[0]), x.shape[-1:]).reshape(-1).sum(),
}


class _Module(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MODULES[self.name](x)


def _programs() -> list[str]:
    exported = [torch.export.export(_Module(name), (torch.ones(4, 4),), strict=False) for name in MODULES]
    return [str(program.run_decompositions(decompositions()).graph) for program in exported]


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_override_composite_implicit_decomp", "_collect_all_valid_cia_ops"):
        monkeypatch.setattr(exported_program, name, getattr(exported_program, name))
    speed_up_export()


def test_repeated_decompositions_equal_those_of_torch(request: pytest.FixtureRequest) -> None:
    expected = _programs()
    kernels = {op: dict(op.py_kernels) for op in torch._export.utils._collect_all_valid_cia_ops()}
    rules = dict(fake_impls.op_implementations_dict)
    request.getfixturevalue("patched")
    for _ in range(3):
        assert _programs() == expected
        assert {op: op.py_kernels for op in kernels} == kernels
        assert fake_impls.op_implementations_dict == rules


def test_overrides_are_built_once(patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _programs()
    monkeypatch.setattr(exported_program, "_get_decomp_for_cia", lambda op: pytest.fail(f"built again for {op}"))
    _programs()


def test_a_kernel_registered_later_stays(patched: None) -> None:
    op = torch.ops.aten.softmax.int
    before = _programs()
    kernels = dict(op.py_kernels)
    op.py_kernels[torch._C.DispatchKey.CPU] = kernel = lambda *_: None
    try:
        assert _programs() == before
        assert op.py_kernels[torch._C.DispatchKey.CPU] is kernel
    finally:
        op.py_kernels.clear()
        op.py_kernels.update(kernels)
        op._dispatch_cache.clear()
