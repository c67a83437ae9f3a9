"""Which loops a capture keeps, how it connects their iterations, and which it unrolls."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.loop import Loop
from mtmc_lsp.core.workload import Capture
from tests.codegen.harness import verified
from tests.loops.examples import LOOPS
from tests.planning.situations import fully_fused, start

UNROLLED = """
import torch


# mtmc: x=f32[B,T,D] B=2 T=17 D=4
def running_sums(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = torch.tanh(h + torch.logcumsumexp(h + x[:, t], 1))
    return h


# mtmc: x=f32[B,T] B=2 T=17
def alternating(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = h + x[:, t] if t % 2 else h - x[:, t]
    return h


# mtmc: x=f32[B,T] B=2 T=17
def neighbours(x):
    h = x
    for t in range(17):
        h = h * 0.5 + torch.cummax(h, 1).values
    return h


# mtmc: x=f32[B,T] B=2 T=17
def whole(x):
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        out[:, t] = out.sum(1) + x[:, t]
    return out


# mtmc: x=f32[B,T] B=2 T=17
def length_of_a_list(x):
    outs = []
    for t in range(x.shape[1]):
        outs.append(x[:, t] * 2)
    return torch.stack(outs) / len(outs)


# mtmc: x=f32[B,T] B=2 T=5
def few_steps(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = h * 0.5 + x[:, t]
    return h
"""
REASONS = {
    "running_sums": "its body contains logcumsumexp",
    "alternating": "looks at the number of the iteration",
    "neighbours": "its body contains cummax",
    "whole": "it reads all of a tensor that it writes slice by slice",
    "length_of_a_list": "the length of a list",
    "few_steps": "",
}


def loop_of(capture: Capture) -> Loop:
    (loop,) = [node.loop for node in capture.graph.nodes if node.loop is not None]
    return loop


@pytest.mark.parametrize("name", REASONS)
def test_other_loops_are_unrolled_with_a_note_that_says_why(name: str, captured) -> None:
    capture = captured(UNROLLED, name)
    assert all(node.loop is None for node in capture.graph.nodes)
    notes = [note for note in capture.workload.assumed if "is unrolled" in note]
    assert [REASONS[name] in note for note in notes] == ([True] if REASONS[name] else [])
    if name != "running_sums":
        assert verified(capture, fully_fused(capture, start(capture, UNROLLED))).reason == ""


def test_a_reversed_loop_reads_from_the_end_and_runs_its_first_iteration_before(captured) -> None:
    """The user's code treats the last step differently, so it runs separately."""
    loop = loop_of(captured(LOOPS, "advantages"))
    assert str(loop.count) == "T - 1"
    rows = [(str(item.position.first), item.position.step) for item in loop.inputs if item.position is not None]
    assert set(rows) == {("T - 1", -1), ("T - 2", -1)}
    (written,) = [output.position for output in loop.outputs if output.position is not None]
    assert (str(written.first), written.step, written.dim) == ("T - 2", -1, 0)


def test_what_earlier_iterations_wrote_is_a_state(captured) -> None:
    loop = loop_of(captured(LOOPS, "two_back"))
    assert len(loop.states) == 2
    assert loop.outputs[0].base is not None, "the first two rows are those of the copy"


def test_values_that_do_not_change_stay_outside_the_loop(captured) -> None:
    capture = captured(LOOPS, "Cell")
    outside = [node.word for node in capture.graph.nodes if node.loop is None]
    assert outside == ["sigmoid"]
    assert "sigmoid" not in [node.word for node in loop_of(capture).nodes]


def test_a_number_as_the_first_state_becomes_a_constant_tensor(captured) -> None:
    (state,) = loop_of(captured(LOOPS, "from_the_end")).states
    assert (state.initial, state.argument, state.name) == (0.0, None, "g")


def test_a_loop_without_time_steps_has_a_constant_number_of_iterations(captured) -> None:
    loop = loop_of(captured(LOOPS, "bisection"))
    assert loop.count.constant == 24
    assert {state.name for state in loop.states} == {"low", "high"}


def test_a_long_loop_that_cannot_be_kept_is_refused_with_its_line_and_the_reason(captured) -> None:
    for name, why in (("neighbours", "cummax"), ("length_of_a_list", "the length of a list")):
        source = UNROLLED.replace("range(17)", "range(300)").replace("T=17", "T=300")
        with pytest.raises(TargetUnsupported, match="too many iterations to unroll") as raised:
            captured(source, name)
        assert why in raised.value.message
        line = raised.value.where.line if raised.value.where else 0
        assert source.splitlines()[line - 1].strip().startswith("for ")


@pytest.mark.parametrize(("steps", "is_kept"), [(20, False), (300, True)])
def test_a_loop_with_matrices_that_no_kernel_holds_is_unrolled_if_it_is_short(
    captured, steps: int, is_kept: bool
) -> None:
    source = f"""
import torch


# mtmc: x=f32[B,T,D] w=f32[D,D] u=f32[D,D] B=2 T={steps} D=800
def wide(x, w, u):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        r = torch.sigmoid(h @ u)
        h = torch.tanh(x[:, t] + (r * h) @ w)
    return h
"""
    capture = captured(source, "wide")
    assert any(node.loop is not None for node in capture.graph.nodes) is is_kept
    assert is_kept or "too large for one program instance" in " ".join(capture.workload.assumed)


def test_a_long_loop_without_operations_is_unrolled(captured) -> None:
    source = """
import torch


# mtmc: x=f32[B,T] B=2 T=17
def scaled(x):
    weights = []
    for i in range(400):
        weights.append(0.5**i)
    total = 0.0
    for weight in reversed(weights):
        total += weight
    return torch.relu(x) * total
"""
    assert [node.op for node in captured(source, "scaled").graph.nodes] == ["aten.relu.default", "aten.mul.Tensor"]


SCRIPTED = """
import torch

# As on a GPU: TorchScript fuses the operations of a function that runs several times.
torch._C._jit_override_can_fuse_on_cpu(True)
torch._C._jit_set_te_must_use_llvm_cpu(False)


@torch.jit.script
def smoothed(old: torch.Tensor, new: torch.Tensor, decay: float) -> torch.Tensor:
    return decay * old + new


# mtmc: x=f32[T,B,D] T=20 B=2 D=4
def filtered(x):
    outs = [x[0]]
    for t in range(x.shape[0] - 1):
        outs.append(smoothed(outs[-1], x[t + 1], 0.4))
    return torch.stack(outs)
"""


def test_a_function_of_torchscript_is_captured_although_it_ran_often_enough_to_be_fused(captured) -> None:
    loop = loop_of(captured(SCRIPTED, "filtered"))
    assert {node.word for node in loop.nodes} >= {"mul", "add"}


COUNTED = """
import torch

calls = [0]


# mtmc: x=f32[T,B] T=20000 B=2
def sums(x):
    h = torch.zeros_like(x[0])
    for t in range(x.shape[0]):
        h = h + x[t]
    {effect}
    return h
"""


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        ("x = calls.append(1)", "changes calls"),
        ("h = h + torch.rand(1) * __import__('random').random()", "draws random numbers from Python's random module"),
    ],
)
def test_a_long_loop_that_changes_state_is_refused(effect: str, message: str, captured) -> None:
    with pytest.raises(TargetUnsupported, match="different results|" + message):
        captured(COUNTED.replace("{effect}", effect), "sums")


def test_a_long_loop_without_state_runs_once_before_its_trace(captured, tmp_path) -> None:
    log = tmp_path / "calls"
    effect = f"if type(x) is torch.Tensor: open({str(log)!r}, 'a').write('.')"
    captured(COUNTED.replace("{effect}", effect), "sums")
    captured(COUNTED.replace("T=20000", "T=200").replace("{effect}", effect.replace(".')", "s')")), "sums")
    text = log.read_text()
    assert (text.count("."), text.count("s")) == (1, 2)
