"""Loops over time in functions of installed packages are kept like those of the user's file."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.capture.worker.loops.keeping import Keeper
from mtmc_lsp.capture.worker.loops.kept.kept_loop import LIBRARY_LINES
from mtmc_lsp.capture.worker.loops.statements.functions import library_functions
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.fork_server import INTERPRETER_ENV, ForkServer
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.targets import find_target

PACKAGE = '''import functools
import torch


def announced(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        return function(*args, **kwargs)
    return run


@announced
def recurrence(a, x):
    """The selective scan of a state space model, as in transformers without compiled kernels."""
    state = torch.zeros(x.shape[0], dtype=torch.bfloat16, device=x.device)
    rows = []
    for index in range(x.shape[1]):
        state = a[:, index] * state + x[:, index]
        rows.append(state)
    return torch.stack(rows, dim=-1)


def layers(x, count):
    scales = [1.001 + 0.001 * i for i in range(count)]
    for index in range(count):
        x = x * scales[index]
    for scale in scales:
        x = x + scale
    return x
'''
USER = """import sys
sys.path.insert(0, {folder!r})
import torch
from recurrences_{number} import layers, recurrence

# mtmc: a=f32[N,T]@0.1..0.9 x=f32[N,T] N=3 T=24
def scanned(a, x):
    return torch.tanh(recurrence(a, x))

# mtmc: x=f32[N] N=8
def stacked(x):
    return layers(x, {count})

# mtmc: a=f32[N,T]@0.1..0.9 x=f32[N,T] N=3 T=24
def both(a, x):
    y = recurrence(a, x)
    h = y[:, 0]
    for t in range(1, y.shape[1]):
        h = 0.5 * h + y[:, t]
    return h
"""
_number = iter(range(100))


@pytest.fixture
def installed(captured: Callable[[str, str], Capture], tmp_path: Path) -> Callable[..., Capture]:
    """Captures a target that calls functions of an installed package."""

    def capture(name: str, count: int = 4) -> Capture:
        number = next(_number)
        folder = tmp_path / "site-packages"
        folder.mkdir()
        (folder / f"recurrences_{number}.py").write_text(PACKAGE)
        return captured(USER.format(folder=str(folder), number=number, count=count), name)

    return capture


def test_a_package_s_loop_over_time_is_one_node_for_all_lengths(installed: Callable[..., Capture]) -> None:
    """Its state changes its dtype in the first iteration."""
    capture = installed("scanned")
    (loop,) = (node.loop for node in capture.graph.nodes if node.loop is not None)
    assert str(loop.count) == "T" and "T" in capture.variable_sizes and len(loop.nodes) <= 5
    assert not capture.workload.assumed


def test_loops_of_the_package_and_of_the_user_are_told_apart(installed: Callable[..., Capture]) -> None:
    capture = installed("both")
    loops = [node for node in capture.graph.nodes if node.loop is not None]
    assert [str(node.loop.count) for node in loops if node.loop is not None] == ["T", "T - 1"]
    assert {node.line for node in loops} == {16, 18}


@pytest.mark.parametrize("count", [20, 300])
def test_a_package_s_loop_over_layers_is_unrolled_however_long_it_is(
    count: int, installed: Callable[..., Capture]
) -> None:
    capture = installed("stacked", count)
    assert all(node.loop is None for node in capture.graph.nodes) and len(capture.graph.nodes) == 2 * count
    assert not capture.workload.assumed, "notes name lines of the user's file alone"


def test_a_loop_of_a_package_has_a_line_of_its_own() -> None:
    keeper, namespace = Keeper(), {}
    for path in ("/site-packages/a.py", "/site-packages/b.py"):
        code = compile("def f(x):\n    for i in range(3):\n        x = x + i\n    return x\n", path, "exec")
        exec(code, namespace)
        keeper.code_of(namespace["f"], "model.py")
    assert keeper.files == ["/site-packages/a.py", "/site-packages/b.py"]
    keeper.unrolled = {3: "of a reason", LIBRARY_LINES + 2: "of another"}
    (note,) = keeper.notes(["", "", "for t in x:"])
    assert note == "the loop of line 3 is unrolled, because of a reason: `for t in x:`"


IMPORTED = """import torch
from recurrences import recurrence

# mtmc: a=f32[N,T]@0.1..0.9 x=f32[N,T] N=3 T=24
def scanned(a, x):
    return torch.tanh(recurrence(a, x))
"""


def test_a_loop_of_a_package_that_a_branch_imported_is_kept(tmp_path: Path) -> None:
    """A branch excludes what it imported from garbage collection, which hides it from `gc.get_referrers`."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "recurrences.py").write_text(PACKAGE)
    file = folder / "model.py"
    file.write_text(IMPORTED)
    target = find_target(file.read_bytes(), str(file), "scanned")
    workload = find_workload(str(file), file.read_bytes(), target)
    with ForkServer(sys.executable, INTERPRETER_ENV) as fork_server:
        branch = fork_server.branch(str(file), str(folder))
        try:
            with Worker(sys.executable, cwd=str(folder), env=INTERPRETER_ENV, fork_server=branch) as worker:
                graph = run_capture(workload, file.read_bytes(), worker, 120).graph
        finally:
            branch.close()
    (loop,) = (node.loop for node in graph.nodes if node.loop is not None)
    assert str(loop.count) == "T"


def test_a_function_is_found_among_objects_that_are_not_collected() -> None:
    namespace: dict[str, Callable[..., object]] = {}
    code = compile(
        "def f(x):\n    for i in range(3):\n        x = x + i\n    return x\n", "/site-packages/a.py", "exec"
    )
    exec(code, namespace)
    function = namespace["f"]
    was_enabled = gc.isenabled()
    gc.freeze()
    try:
        assert library_functions([function.__code__]) == [function]
        assert gc.get_freeze_count() and gc.isenabled() == was_enabled
    finally:
        gc.unfreeze()
