"""Modules that write a cache in a buffer, through the whole command."""

from __future__ import annotations

from pathlib import Path

from runner import mtmc, project

CACHE = """import torch
# mtmc: k=f32[B,1,8] B=4 n=3
class Cache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 16, 8))
    def forward(self, k, n: int):
        self.cache[:, n:n+1] = k
        return self.cache[:, :n+1]
"""


def test_a_module_that_returns_a_part_of_the_buffer_it_writes_is_optimised(tmp_path: Path) -> None:
    """Verification calls it several times on one instance, also with gradients, and its kernels also when they do nothing."""
    file = project(tmp_path, CACHE)
    answer = mtmc(tmp_path, "optimize", f"{file}::Cache", "--json")
    run = answer.document
    assert run["final"] is not None, [step["reason"] for step in run["steps"]]
