"""Optimised modules inside FSDP2 (``fully_shard``), on two processes with gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.checker import Checker
from tests.training.programs import ON_TWO_RANKS, run
from tests.training.targets import HEAD, MODULES, planned, text_of

PROGRAM = """
import torch.distributed as dist

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from mtmc_lsp.guard.worker.observed_calls import explain


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(32, 32), block, nn.Linear(32, 8)

    def forward(self, x):
        return self.last(self.block(self.first(x)))


def trained(net, rank, batches):
    # Two micro-batches; gradients are exchanged after the second one.
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(2):
        for number in range(2):
            net.set_requires_gradient_sync(number == 1)
            x = batches[4 * step + 2 * rank + number]
            net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in net.parameters()]


def pair(mesh, shard):
    torch.manual_seed(1)
    nets = Net(user.f()), Net(fast.f())
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        shard(net)
        fully_shard(net, mesh=mesh)
    return nets


def check(mesh, rank, shard, expected):
    net, optimised = pair(mesh, shard)
    batches = torch.randn(8, 32, 32, generator=torch.Generator().manual_seed(3))
    runs()
    mine = trained(optimised, rank, batches)
    assert runs() == expected, runs()
    for value, other in zip(mine, trained(net, rank, batches), strict=True):
        close(value, other)
    with torch.no_grad():
        close(optimised(batches[rank]), net(batches[rank]))


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def work(rank):
    mesh = init_device_mesh("cpu", (2,))
    both = ["forward", "backward"] * 4
    # The target's parameters belong to the root, to itself (freed after the forward pass, or kept), or to its parts.
    check(mesh, rank, lambda net: None, both)
    check(mesh, rank, lambda net: fully_shard(net.block, mesh=mesh), both)
    check(mesh, rank, lambda net: fully_shard(net.block, mesh=mesh, reshard_after_forward=False), both)
    check(mesh, rank, lambda net: fully_shard(net.block.up, mesh=mesh), [])
    # Parameters are cast to another dtype than that of the kernels.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    check(mesh, rank, lambda net: fully_shard(net.block, mesh=mesh, mp_policy=policy), [])

    # A subclass of the user's class may change anything.
    class Other(fast.f):
        pass

    other = Other()
    fully_shard(other, mesh=mesh)
    other(torch.randn(32, 32))
    assert runs() == []
    reason = explain(fast.f_fits, (other, torch.randn(32, 32)), {}).reason
    assert reason == "self is a FSDPOther; the kernels were made for a f", reason

    # Outside the forward pass of the root, parameters are DTensors.
    net, optimised = pair(mesh, lambda net: None)
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(4))
    net(x), optimised(x)
    for each in (net, optimised):
        each.reshard()
    runs()
    errors = [error_of(lambda: each.block(x)) for each in (net, optimised)]
    assert errors[0] and errors[0] == errors[1], errors
    assert isinstance(optimised.block.up.weight, DTensor) and runs() == []
    replicated = distribute_tensor(x, mesh, [Replicate()])
    results = [each.block(replicated) for each in (net, optimised)]
    assert runs() == [] and isinstance(results[1], DTensor)
    close(results[1].full_tensor(), results[0].full_tensor())
"""


@pytest.mark.slow
def test_a_sharded_module_trains_as_the_users_module(checker: Checker, tmp_path: Path) -> None:
    capture = checker.capture(HEAD + MODULES["perceptron"])
    run(tmp_path, text_of(capture), planned(capture), PROGRAM + ON_TWO_RANKS)
