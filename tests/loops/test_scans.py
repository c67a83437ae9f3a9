"""Loops over time steps run as associative scans with the results of the user's code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.ir.loops.fusion import fused_loop
from mtmc_lsp.ir.loops.scan import scan_form
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.schedule import Schedule
from tests.cli.runner import mtmc, project
from tests.codegen.harness import compile_errors, verified
from tests.loops.examples import LOOPS
from tests.loops.scans import NAMES, SCANS
from tests.planning.situations import H200, act, fully_fused, proposed, schedule_of, situation, start, timing

OTHERS = "recurrence advantages from_the_end moving_average selective_scan in_place two_back products counted half seen_so_far".split()
CASES = [(SCANS, name) for name in NAMES] + [(LOOPS, name) for name in OTHERS]


def scanned(capture, text: str, **config: int):
    candidate = fully_fused(capture, start(capture, text))
    (plan,) = [plan for plan in schedule_of(candidate).kernels if hasattr(plan.config, "segments")]
    changes = {"rows": 1, "block": max(8, plan.config.block if plan.config.block < 32 else 8), "warps": 1, **config}
    return act(capture, candidate, ActionKind.PARALLEL_SCAN, *plan.nodes, config=changes)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize(("text", "name"), CASES, ids=[name for _, name in CASES])
def test_a_scan_has_the_results_of_the_users_loop(text: str, name: str, segments: int, captured) -> None:
    capture = captured(text, name)
    candidate = scanned(capture, text, steps=16, segments=segments)
    assert ("tl.associative_scan(" in candidate.code.block) == (name != "differences"), "its state is never combined"
    assert verified(capture, candidate).reason == ""
    # Several segments have the kernels of one, too.
    assert segments == 1 or compile_errors(capture, candidate, ["sm_90", "gfx942"]) == []


KINDS = {
    "running_sum": ["sum"],
    "one_series": ["affine"],
    "extremes": ["max", "min"],
    "cusum": ["max-plus"],
    "log_sum_exp": ["max", "affine"],
    "resets": ["affine"],
    "biquad": ["matrix"],
    "wkv": ["max-plus", "affine", "affine"],
    "running_product": ["product"],
    "chained": ["affine", "affine"],
    "seen_so_far": ["logic", "sum"],
    "two_back": ["matrix"],
    "in_place": ["affine"],
    "half": ["affine"],
    "lengths": ["affine"],
    "energy": ["affine"],
    "differences": ["shift"],
    "limited": ["min-plus"],
    "forward_score": ["log-add-exp"],
    "largest_index": ["max"],
    "strength": ["affine", "affine"],
    "all_positive": ["logic"],
}


@pytest.mark.parametrize("name", KINDS)
def test_the_form_of_each_update_is_read_from_the_body(name: str, captured) -> None:
    capture = captured(SCANS if name in NAMES else LOOPS, name)
    (loop,) = [node.name for node in capture.graph.nodes if node.loop is not None]
    scan = scan_form(fused_loop(ir_of(capture.graph, Schedule()), [loop]))
    assert [item.kind.value for item in scan.recurrences] == KINDS[name]
    assert scan.levels == (2 if name in ("log_sum_exp", "wkv", "chained", "seen_so_far") else 1)


NOT_A_SCAN = {"masked": "h", "bisection": "high, low", "normalised": "p"}
"""Loops with a tanh, a comparison or a softmax of the state."""


@pytest.mark.parametrize("name", NOT_A_SCAN)
def test_another_update_is_refused_with_the_name_of_the_state(name: str, captured) -> None:
    capture = captured(LOOPS, name)
    message = f"parallel-scan: steps cannot be 16: the update of {NOT_A_SCAN[name]} is neither affine in the state nor"
    with pytest.raises(CannotCode, match=re.escape(message)):
        scanned(capture, LOOPS, steps=16)
    assert proposed(capture, fully_fused(capture, start(capture, LOOPS)), ActionKind.PARALLEL_SCAN, device=H200) == []


def test_the_factor_of_a_state_may_be_any_function_of_a_solved_state(captured) -> None:
    capture = captured(LOOPS, "pairs")
    candidate = scanned(capture, LOOPS, steps=16, segments=2)
    assert verified(capture, candidate).reason == ""
    assert candidate.code.block.count("def pairs") - candidate.code.block.count("_again(") >= 3, (
        "two levels and the result"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"steps": 8}, "steps cannot be 8; it must be 1 or at least 16"),
        ({"steps": 16, "rows": 2}, "rows cannot be 2: a program that scans 16 steps has one row"),
        ({"steps": 1, "segments": 2}, "segments cannot be 2: iterations that run one after another share no work"),
        ({"steps": 16, "precision": "ieee"}, "a loop kernel has no precision to choose"),
    ],
)
def test_a_scan_that_cannot_be_is_refused(config: dict[str, object], message: str, captured) -> None:
    capture = captured(LOOPS, "recurrence")
    with pytest.raises(CannotCode, match=re.escape(message)):
        scanned(capture, LOOPS, **config)


def test_a_reduction_in_the_body_needs_all_columns(captured) -> None:
    capture = captured(LOOPS, "selective_scan")
    with pytest.raises(CannotCode, match="block cannot be 4: a reduction in the body needs all 5 columns"):
        scanned(capture, LOOPS, steps=16, block=4)


def sized(batch: int, steps: int, width: int) -> str:
    return LOOPS.replace(
        "a=f32[B,T,D] b=f32[B,T,D] B=3 T=20 D=5", f"a=f32[B,T,D] b=f32[B,T,D] B={batch} T={steps} D={width}"
    )


def test_few_states_over_many_steps_are_scanned(captured) -> None:
    text = sized(4, 65536, 64)
    capture = captured(text, "recurrence")
    candidate = fully_fused(capture, start(capture, text))
    (action,) = proposed(capture, candidate, ActionKind.PARALLEL_SCAN, device=H200)
    assert action.text == "Scan the iterations of the kernel for the result in parallel"
    assert action.rationale.startswith(
        "65536 iterations one after another for 256 independent elements of the state leave 132 multiprocessors mostly idle."
    )
    assert action.params["config"]["segments"] >= 16
    assert action.expected.saved_us > 1000


def first_steps(capture, candidate, history=()):
    """The proposals without a kernel, best first, on an H200."""
    return proposals(situation(capture, candidate, device=H200, has_gpu=True, history=history))


def test_the_first_step_of_a_loop_is_the_form_with_the_shortest_predicted_time(captured) -> None:
    text = sized(4, 16384, 64)
    capture = captured(text, "recurrence")
    candidate = start(capture, text)
    scan, fuse = first_steps(capture, candidate)[:2]
    assert (scan.kind, fuse.kind) == (ActionKind.PARALLEL_SCAN, ActionKind.FUSE)
    assert scan.text == "Scan the iterations of the loop in parallel for the result"
    assert re.fullmatch(
        r"Eager mode runs 2 operations in each of 16384 iterations, one launch after another\. In one kernel, 16384 iterations "
        r"one after another for 256 .*\. One iteration after another in one kernel is predicted to take \d+ us, this \d+ us\.",
        scan.rationale,
    )
    assert scan.expected.saved_us > fuse.expected.saved_us
    scanning, sequential = (BuiltinCoder().write(capture, candidate, action) for action in (scan, fuse))
    assert "tl.associative_scan(" in scanning.code.block
    assert "tl.associative_scan(" not in sequential.code.block
    assert compile_errors(capture, scanning, ["sm_90", "gfx942"]) == []


@pytest.mark.parametrize("status", [StepStatus.FAILED, StepStatus.REJECTED])
def test_a_scan_that_is_not_accepted_is_followed_by_the_sequential_kernel(status: StepStatus, captured) -> None:
    text = sized(4, 16384, 64)
    capture = captured(text, "recurrence")
    candidate = start(capture, text)
    scan, fuse = first_steps(capture, candidate)[:2]
    history = [Step(1, scan, status, "slower")]
    following = first_steps(capture, candidate, history)
    assert following[0] == fuse
    assert ActionKind.PARALLEL_SCAN not in {action.kind for action in following}
    after = BuiltinCoder().write(capture, candidate, fuse)
    history.append(Step(2, fuse, StepStatus.ACCEPTED, "faster", candidate=after))
    kinds = {action.kind for action in first_steps(capture, after, history)}
    assert kinds.isdisjoint({ActionKind.PARALLEL_SCAN, ActionKind.FUSE}), "the scan is not tried again"


def test_a_run_without_scans_begins_with_the_sequential_kernel(captured) -> None:
    text = sized(4, 16384, 64)
    capture = captured(text, "recurrence")
    planner = RooflinePlanner(exclude=["parallel-scan"])
    ranked = planner.ranked_in(situation(capture, start(capture, text), device=H200, has_gpu=True))
    assert ranked[0].kind is ActionKind.FUSE
    assert ranked[0].params["config"]["steps"] == 1


@pytest.mark.parametrize(("graph_us", "is_slow"), [(900.0, False), (8000.0, True)])
def test_a_scan_that_takes_longer_than_predicted_is_compared_with_the_sequential_kernel(
    graph_us: float, is_slow: bool, captured
) -> None:
    text = sized(4, 16384, 64)
    capture = captured(text, "recurrence")
    candidate = start(capture, text)
    scan = first_steps(capture, candidate)[0]
    after = BuiltinCoder().write(capture, candidate, scan)
    step = Step(1, scan, StepStatus.ACCEPTED, "60x", candidate=after, timing=timing(9000.0, 60.0, graph_us))
    actions = [action for action in first_steps(capture, after, [step]) if action.kind is ActionKind.FUSE]
    assert bool(actions) is is_slow, "the time of the kernels counts, not that of the launches"
    for action in actions:
        assert action.text == "Run the iterations of the kernel for the result one after another"
        assert action.rationale.startswith("The call takes 8000 us, predicted were ")
        sequential = BuiltinCoder().write(capture, after, action)
        assert "tl.associative_scan(" not in sequential.code.block
        history = [step, Step(2, action, StepStatus.ACCEPTED, "3x", candidate=sequential)]
        following = first_steps(capture, sequential, history)
        assert {action.kind for action in following}.isdisjoint({ActionKind.PARALLEL_SCAN, ActionKind.FUSE})


@pytest.mark.parametrize(("batch", "steps", "width"), [(64, 2048, 1024), (4, 20, 64)])
def test_states_that_fill_the_device_and_few_steps_run_one_after_another(
    batch: int, steps: int, width: int, captured
) -> None:
    text = sized(batch, steps, width)
    capture = captured(text, "recurrence")
    candidate = fully_fused(capture, start(capture, text))
    assert proposed(capture, candidate, ActionKind.PARALLEL_SCAN, device=H200) == []
    assert first_steps(capture, start(capture, text))[0].kind is ActionKind.FUSE


def test_autotune_tries_other_chunks_and_segments(captured) -> None:
    text = sized(4, 65536, 64)
    capture = captured(text, "recurrence")
    candidate = scanned(capture, text, steps=32, segments=16, block=32, warps=4)
    (action,) = proposed(capture, candidate, ActionKind.AUTOTUNE, device=H200, has_gpu=True)
    configs = [variant["config"] for variant in action.params["variants"]]
    assert len({config["steps"] for config in configs if "steps" in config}) > 1
    assert len({config["segments"] for config in configs if "segments" in config}) > 1


def test_the_code_of_a_scan_does_not_grow_with_the_sequence(captured) -> None:
    lengths = []
    for steps in (256, 65536):
        text = sized(4, steps, 64)
        capture = captured(text, "recurrence")
        lengths.append(len(scanned(capture, text, steps=32, segments=8, block=32).code.block.splitlines()))
    assert lengths[0] == lengths[1] < 320


def test_a_run_shows_the_scan_as_a_step(tmp_path) -> None:
    file = project(tmp_path, sized(1, 4096, 8).replace("return out, out + values", "return out"))
    run = mtmc(tmp_path, "optimize", f"{file.name}::recurrence")
    assert run.code == 0, run.err
    assert "Step 1  Scan the iterations of the loop in parallel for the result" in run.out
    assert "Step 2" not in run.out, "the sequential kernel is no step before it"
    assert run.out.count("same results as your code") == 1


BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "loops" / "few_states.py"


@pytest.mark.parametrize("name", re.findall(r"def (\w+)\(", BENCHMARK.read_text(encoding="utf-8")))
def test_the_benchmarks_of_few_states_are_scanned(name: str, captured) -> None:
    text = BENCHMARK.read_text(encoding="utf-8")
    capture = captured(text, name)
    candidate = start(capture, text)
    action = first_steps(capture, candidate)[0]
    assert action.kind is ActionKind.PARALLEL_SCAN
    after = BuiltinCoder().write(capture, candidate, action)
    assert compile_errors(capture, after, ["sm_90", "gfx942"]) == []
