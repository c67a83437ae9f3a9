"""Gradients of broadcast tensors: sums over all rows that the kernel of these rows computes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.ir.regions import Region, analyse
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.configs import IllegalConfig, TileConfig
from mtmc_lsp.schedule.legality import decoded
from mtmc_lsp.schedule.reductions.column_sum_configs import column_sum_config
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.schedule_cost import schedule_cost
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.worker.run_target import UPSTREAM
from tests.codegen.checker import Checker, start, with_kernel
from tests.training.targets import HEAD, planned

RMS = "torch.rsqrt({0}.pow(2).mean(-1, keepdim=True) + 1e-6)"
TARGETS: dict[str, tuple[str, int]] = {
    "rms norm": (
        f"""# mtmc: x=f32[B,D] w=f32[D] B=4096 D=1024 grad=x,w
def f(x, w):
    return x * {RMS.format("x")} * w
""",
        1,
    ),
    "layer norm of a sequence": (
        """# mtmc: x=f16[B,S,D] w=f16[D] b=f16[D] B=16 S=256 D=1024 grad=x,w,b
def f(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b)
""",
        2,
    ),
    "residual sum and norm, two results": (
        f"""# mtmc: x=bf16[B,D] r=bf16[B,D] w=bf16[D] B=4096 D=1024 grad=x,r,w
def f(x, r, w):
    added = x + r
    h = added.float()
    return w * (h * {RMS.format("h")}).to(x.dtype), added
""",
        1,
    ),
    "elementwise operations with a bias": (
        """# mtmc: x=f32[B,D] b=f32[D] B=4096 D=1024 grad=x,b
def f(x, b):
    return F.gelu(x + b)
""",
        1,
    ),
    "gate with factors": (
        """# mtmc: x=f32[B,D] y=f32[B,D] a=f32[D] c=f32[D] B=4096 D=1024 grad=x,y,a,c
def f(x, y, a, c):
    return F.silu(x * a) * (y * c)
""",
        2,
    ),
    "norm of heads": (
        """# mtmc: x=bf16[B,S,H,E] w=bf16[E] B=4 S=1024 H=16 E=128 grad=x,w
def f(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)
""",
        1,
    ),
    "softmax of scaled values": (
        """# mtmc: x=f32[B,D] scale=f32[D] B=4096 D=1024 grad=x,scale
def f(x, scale):
    return torch.softmax(x * scale, -1)
""",
        1,
    ),
    "operations after the sum": (
        f"""# mtmc: x=f32[B,D] w=f32[D] B=4096 D=1024 grad=x,w
def f(x, w):
    return x * {RMS.format("x")} * torch.exp(-w)
""",
        1,
    ),
    "two norms of one tensor": (
        f"""# mtmc: x=f32[B,D] v=f32[D] w=f32[D] b=f32[D] B=4096 D=1024 grad=x,v,w,b
def f(x, v, w, b):
    return x * {RMS.format("x")} * v, F.layer_norm(x, (x.shape[-1],), w, b)
""",
        3,
    ),
}
SMALL = (
    {"B": 5, "S": 3, "D": 77, "H": 2, "E": 24},
    {"B": 1, "S": 1, "D": 1, "H": 1, "E": 3},
    {"B": 37, "S": 2, "D": 64, "H": 3, "E": 8},
    {"B": 1101, "S": 1, "D": 9, "H": 2, "E": 5},
)
"""Sizes of cases: fewer rows than programs and more, tiles that are not full, a single row."""


def regions(capture: Capture, candidate: Candidate) -> list[Region]:
    """The regions of the kernels with column sums."""
    schedule = from_json(Schedule, candidate.schedule)
    ir = ir_of(capture.graph, schedule)
    every = [analyse(ir, plan.nodes, plan.recomputed) for plan in schedule.kernels]
    return [region for region in every if region.sums]


def small_cases(capture: Capture) -> list[Case]:
    """Small sizes, with several forms of upstream gradients."""
    names = capture.graph.sizes
    return [
        Case({name: sizes[name] for name in names}, "normal", seed)
        for seed in range(len(UPSTREAM))
        for sizes in (SMALL if seed == 0 else (SMALL[0], SMALL[-1]))
    ]


@pytest.mark.parametrize("name", TARGETS)
def test_one_kernel_reads_the_rows_and_computes_the_sums_over_them(checker: Checker, name: str) -> None:
    text, sums = TARGETS[name]
    capture = checker.capture(HEAD + text)
    candidate = planned(capture)
    [region] = regions(capture, candidate)
    assert len(region.sums) == sums
    backward = re.search(r"^def f_backward\(.*?\n(?=\n\n)", candidate.source, re.DOTALL | re.MULTILINE)
    assert backward is not None
    assert len(re.findall(r"_kernel\[", backward[0])) == 2 and "torch.sum" not in backward[0]
    assert "atomic" not in candidate.source
    assert checker.first_failure(capture, candidate, small_cases(capture)) == ""
    assert [report.error for report in checker.reports(capture, candidate) if report.error or report.spills] == []


NORM = TARGETS["layer norm of a sequence"][0].replace("B,S,D", "B,D").replace("B=16 S=256", "B=4096")


def test_rows_are_read_once_for_all_gradients(checker: Checker) -> None:
    """The backward pass of a layer norm reads x and its gradient, and writes one gradient of this size."""
    capture = checker.capture(HEAD + NORM)
    candidate = planned(capture)
    schedule = from_json(Schedule, candidate.schedule)
    ir = ir_of(capture.graph, schedule)
    device = planning_model(("sm_90",))
    tensor = 2 * 4096 * 1024
    moved = schedule_cost(ir, schedule, device).bytes
    [plan] = [each for each in schedule.kernels if analyse(ir, each.nodes, each.recomputed).sums]
    assert isinstance(plan.config, TileConfig)
    partials = 2 * 2 * plan.config.persist * 1024 * 4
    # Five times a tensor in both passes; the statistics of rows and the vectors are small.
    assert 0 < moved - 5 * tensor - partials < 0.02 * tensor


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"persist": 0}, "persist cannot be 0"),
        ({"split": 2}, "split cannot be 2"),
        ({"loop": True}, "loop and block cannot be True and 1024"),
        ({"block": 512}, "loop and block cannot be False and 512"),
    ],
)
def test_its_programs_have_a_fixed_number_and_hold_whole_rows(
    checker: Checker, change: dict[str, object], reason: str
) -> None:
    capture = checker.capture(HEAD + TARGETS["rms norm"][0])
    [region] = regions(capture, planned(capture))
    config = {"kind": "tile", "rows": 1, "block": 1024, "persist": 264}
    ir = ir_of(capture.graph, Schedule())
    assert decoded(ir, region, config) == TileConfig(1, 1024, persist=264)
    with pytest.raises(IllegalConfig, match=reason):
        decoded(ir, region, {**config, "persist": 0 if "split" in change else 264, **change})


APART = {
    "more sums than registers hold": """# mtmc: x=f32[B,D] w=f32[D] b=f32[D] B=512 D=32768 grad=x,w,b
def f(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b)
""",
    "rows are contiguous in memory": """# mtmc: x=f32[D,B] w=f32[D] B=4096 D=1024 grad=x,w
def f(x, w):
    return torch.softmax(x.t() * w, -1)
""",
}


@pytest.mark.parametrize("name", APART)
def test_sums_stay_apart_from_rows(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + APART[name])
    candidate = planned(capture)
    columns = [len(region.sums) * region.columns.value(capture.graph.sizes) for region in regions(capture, candidate)]
    assert columns == []
    assert checker.first_failure(capture, candidate, small_cases(capture)[:3]) == ""


def test_what_depends_on_a_sum_and_has_rows_is_another_kernel(checker: Checker) -> None:
    text = """# mtmc: x=f32[B,D] w=f32[D] B=4096 D=1024 grad=x,w
def f(x, w):
    return torch.softmax((x - x.mean(0)) * w, -1)
"""
    capture = checker.capture(HEAD + text)
    candidate = planned(capture)
    [region] = regions(capture, candidate)
    assert len(region.sums) == 2
    backward = re.search(r"^def f_backward\(.*?\n(?=\n\n)", candidate.source, re.DOTALL | re.MULTILINE)
    assert backward is not None and len(re.findall(r"_kernel\[", backward[0])) == 3
    assert checker.first_failure(capture, candidate, small_cases(capture)[:3]) == ""


def test_equal_constant_sizes_do_not_confuse_rows_and_columns(checker: Checker) -> None:
    text = TARGETS["rms norm"][0].replace("[B,D]", "[64,64]").replace("[D]", "[64]").replace("B=4096 D=1024 ", "")
    capture = checker.capture(HEAD + text)
    start_candidate = start(capture)
    every = [node.name for node in capture.graph.nodes if node.name in capture.graph.backward_nodes]
    config = {"kind": "tile", "rows": 4, "block": 64, "persist": 6}
    candidate = with_kernel(capture, start_candidate, every, config)
    [region] = regions(capture, candidate)
    assert len(region.sums) == 1
    assert (
        checker.first_failure(capture, candidate, [Case(dict(capture.graph.sizes), "normal", seed) for seed in (0, 1)])
        == ""
    )


def test_longer_rows_get_more_warps(checker: Checker) -> None:
    capture = checker.capture(HEAD + NORM)
    candidate = planned(capture)
    text = re.search(r"num_warps=(max\(.*\)),\s+num_stages", candidate.source)
    assert text is not None
    warps = {n_cols: eval(text[1], {"D": n_cols}) for n_cols in (1, 500, 1000, 1024, 4096, 8192)}
    schedule = from_json(Schedule, candidate.schedule)
    [config] = [each.config for each in schedule.kernels if isinstance(each.config, TileConfig) and each.config.persist]
    assert warps == {1: 1, 500: 2, 1000: 4, 1024: 4, 4096: 16, 8192: 16}
    assert config.warps == warps[1024]


def test_the_next_rows_are_loaded_ahead_where_shared_memory_holds_them(checker: Checker) -> None:
    """Also the longest rows that the guard admits: 16384 columns of two float32 tensors are 128 KB."""
    capture = checker.capture(HEAD + TARGETS["rms norm"][0])
    candidate = planned(capture)
    [region] = regions(capture, candidate)
    ir = ir_of(capture.graph, Schedule())
    device = planning_model(("sm_90",))
    small = replace(device, shared_bytes=99 * 1024)
    configs = [column_sum_config(ir, region, each) for each in (device, small)]
    assert [config.stages for config in configs] == [2, 1]
    assert "tl.num_programs(0), num_stages=2)" in candidate.source
