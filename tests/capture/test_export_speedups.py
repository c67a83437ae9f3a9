"""The patched export gives the same programs as torch's, and leaves torch's state unchanged."""

from __future__ import annotations

import pytest
import torch
import torch._decomp.decompositions as decomp
import torch._export.utils
import torch.nn.functional as F
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import exported_program
from torch.fx.experimental.proxy_tensor import make_fx

from mtmc_lsp.capture.worker.passes.decompositions import decompositions
from mtmc_lsp.capture.worker.speedups.operators import speed_up_export

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
    monkeypatch.setattr(decomp, "native_batch_norm_helper", decomp.native_batch_norm_helper)
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


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "part": lambda x: x[:, :, ::2],
    "one image": lambda x: x[:1],
    "one pixel": lambda x: x[:, :, :1, :1],
}


def _normalised(layout: str, dtype: torch.dtype, device: str, *, training: bool = False) -> list[object]:
    """What a batch norm on tensors without data returns, by both of torch's operators."""
    FakeTensorMode.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = LAYOUTS[layout](torch.empty(4, 3, 6, 5, dtype=dtype, device=device))
        mean, variance, weight = (torch.empty(3, dtype=dtype, device=device) for _ in range(3))
        results = [F.batch_norm(x, mean, variance, weight, weight, training)]
        if not training:
            results += torch.ops.aten._native_batch_norm_legit_no_training(x, weight, None, mean, variance, 0.1, 1e-5)
        kinds: list[object] = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in results]
        for wrong in (torch.empty(2, dtype=dtype, device=device), torch.empty(1, 3, dtype=dtype, device=device)):
            try:
                kinds.append(F.batch_norm(x, wrong, variance, weight, weight, training).shape)
            except Exception as error:
                kinds.append((type(error), str(error)))
        return kinds


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_batch_norm_without_data_has_the_results_that_torch_computes(
    layout: str, dtype: torch.dtype, device: str, request: pytest.FixtureRequest
) -> None:
    expected = [_normalised(layout, dtype, device, training=training) for training in (False, True)]
    request.getfixturevalue("patched")
    assert [_normalised(layout, dtype, device, training=training) for training in (False, True)] == expected


def test_a_batch_norm_without_data_is_computed_only_where_its_arithmetic_is_traced(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Computed(Exception):
        pass

    def computes(*_: object) -> None:
        raise Computed

    def norm(x: torch.Tensor) -> torch.Tensor:
        stats = torch.ones(3, dtype=x.dtype)
        return torch.ops.aten._native_batch_norm_legit_no_training(x, stats, stats, stats, stats, 0.1, 1e-5)[0]

    ops = (torch.ops.aten._native_batch_norm_legit_no_training, torch.ops.aten._native_batch_norm_legit)
    table = torch._decomp.get_decompositions(ops)
    with torch.no_grad():
        traced = make_fx(norm, decomposition_table=table, tracing_mode="fake")(torch.ones(2, 3, 4, 4))
        assert "aten.sqrt" in str(traced.graph)
        monkeypatch.setattr(decomp, "_unsqueeze_to_dim", computes)
        FakeTensorMode.cache_clear()
        with FakeTensorMode():
            assert norm(torch.empty(2, 3, 4, 4)).shape == (2, 3, 4, 4)
        with pytest.raises(Computed):
            make_fx(norm, decomposition_table=table, tracing_mode="fake")(torch.ones(2, 3, 4, 4))
