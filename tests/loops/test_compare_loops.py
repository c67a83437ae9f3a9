"""The comparison of loops with kernels of other libraries: each mapping has the results of the loop."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtmc_lsp.process.module_files import load_file
from tests.verify.clocks import SleepClock

torch = pytest.importorskip("torch")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.append(str(SCRIPTS))
import compare_loops  # noqa: E402
import compared  # noqa: E402
from loop_counterparts import COUNTERPARTS, FLA, LOOPS, Contender, Counterpart  # noqa: E402

ROOT = SCRIPTS.parent
SMALL = {"B": 2, "T": 20, "C": 40}
ON_A_CPU = [problem for problem, counterpart in COUNTERPARTS.items() if counterpart.library != FLA]
OF_FLA = [problem for problem, counterpart in COUNTERPARTS.items() if counterpart.library == FLA]


def case(problem: str, counterpart: Counterpart | None = None, delivered: Any = None) -> compare_loops.Case:
    """A case with small sizes on a CPU. Sizes that parameters have stay as they are."""
    found = counterpart or COUNTERPARTS[problem]
    workload = compared.workload_of(problem, found.suite)
    sizes = {name: min(value, SMALL.get(name, value)) for name, value in workload.sizes.items()}
    original = load_file(compared.file_of(problem, found.suite)[0])
    return compare_loops.Case(problem, workload, original, delivered, found, sizes, "cpu")


@pytest.mark.parametrize("problem", COUNTERPARTS)
def test_each_counterpart_is_of_a_target_with_a_workload(problem: str) -> None:
    made = case(problem)
    assert {name: each.dtype for name, each in made.inputs().items()}.keys() == made.workload.tensors.keys()
    assert all(each.device.type == "cpu" for each in made.inputs().values())
    assert made.counterpart.contenders
    assert any(not each.is_rounded for each in made.counterpart.contenders.values())


@pytest.mark.parametrize("problem", ON_A_CPU)
def test_layers_and_scans_of_torch_have_the_results_of_the_loop(problem: str, clock: SleepClock) -> None:
    row = compare_loops.measured(case(problem), clock, 0.0)
    assert [row[name].get("error") for name in compare_loops.contenders(row)] == [None] * (2 + len(row["others"]))
    assert all(row[name]["distance"] < 1e-5 for name in row["others"])
    assert torch.backends.cudnn.allow_tf32


INTERPRETED = """
import sys, torch
from triton.runtime.autotuner import Autotuner
Autotuner._bench = lambda self, *arguments, config, **options: [1.0] * 3
import fla.ops.hgrn, fla.ops.simple_gla
from fla.ops.hgrn.naive import naive_recurrent_hgrn
from fla.ops.simple_gla.naive import naive_chunk_simple_gla
# The interpreter does not run the library's kernels for chunks; these functions have the same arguments.
fla.ops.hgrn.chunk_hgrn = naive_recurrent_hgrn
fla.ops.simple_gla.chunk_simple_gla = naive_chunk_simple_gla
torch.compile = lambda function: function
from tests.loops.test_compare_loops import OF_FLA, case, distances
for problem in OF_FLA:
    for name, apart in distances(case(problem)).items():
        print(problem, name, apart, sep="|")
"""


def distances(made: compare_loops.Case) -> dict[str, float]:
    """The distances of the contenders from the loop, without times."""

    def tensors(result: Any) -> list[Any]:
        return [each for each in compared.flatten(result) if isinstance(each, torch.Tensor)]

    with torch.no_grad():
        expected = tensors(made.function(made.original)(**made.inputs()))
        calls = {
            name: each.make(made.module(made.original), made.inputs())
            for name, each in made.counterpart.contenders.items()
        }
        return {name: compared.distance(tensors(call()), expected) for name, call in calls.items()}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
def test_kernels_of_flash_linear_attention_have_the_results_of_the_loop() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800
    )
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == set(OF_FLA), done.stderr
    assert all(float(line[2]) < 1e-5 for line in lines), lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SleepClock:
    """A clock that counts sleeps, and 100 us for each call."""
    made = SleepClock()
    made.install(monkeypatch)
    return made


def slept(us: float, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, slower."""

    @functools.wraps(function)
    def slower(*arguments: Any, **options: Any) -> Any:
        time.sleep(us * 1e-6)
        return function(*arguments, **options)

    return slower


def scan(us: float, factor: float = 1.0) -> Contender:
    """Drawdowns by torch, times a factor."""

    def make(module: Any, inputs: Any) -> Callable[[], Any]:
        prices = inputs["prices"]
        return slept(us, lambda: (1 - prices / prices.cummax(1).values) * factor)

    return Contender(make)


def drawdowns(others: dict[str, Contender], ours_us: float = 0.0) -> compare_loops.Case:
    problem = "few_states::drawdowns"
    original = load_file(LOOPS / "few_states.py").drawdowns
    fits = {"drawdowns_fits": lambda prices: True}
    delivered = SimpleNamespace(drawdowns=slept(ours_us, original), **fits) if ours_us else None
    return case(problem, Counterpart("torch", others), delivered)


def test_the_fastest_contender_counts_and_other_results_get_no_time(clock: SleepClock) -> None:
    others = {"slow": scan(300), "fast": scan(200), "wrong": scan(100, 1.02)}
    row = compare_loops.measured(drawdowns(others, 400), clock, 0.2)
    assert "differ from those of eager mode" in row["wrong"]["error"] and "us" not in row["wrong"]
    assert row["ours"]["us"] == pytest.approx(500, rel=0.05) and row["kernels_run"] is True
    row |= {"problem": "few_states::drawdowns", "sizes": {"N": 2}}
    assert compare_loops.fastest(row, is_rounded=True) == pytest.approx(300, rel=0.05)
    assert json.loads(json.dumps(row)) == row


def test_a_library_that_is_not_installed_does_not_end_the_row(clock: SleepClock) -> None:
    def absent(module: Any, inputs: Any) -> Any:
        raise ImportError("no module")

    row = compare_loops.measured(drawdowns({"absent": Contender(absent), "scan": scan(100)}), clock, 0.2)
    assert row["absent"] == {"error": "ImportError: no module"}
    assert row["scan"]["us"] and row["eager"] and row["ours"] == {} and row["kernels_run"] is None


def test_a_loop_that_is_far_slower_is_called_a_few_times_only(clock: SleepClock) -> None:
    made = drawdowns({"scan": scan(0)}, 10)
    made.original.drawdowns = slept(1e6, made.original.drawdowns)
    row = compare_loops.measured(made, clock, 2.0)
    assert row["eager"]["samples"] == 1 and row["eager"]["us"] == pytest.approx(1e6, rel=0.01)
    assert row["eager"]["graph_us"] is None
    assert row["scan"]["samples"] >= 25 and row["ours"]["samples"] >= 25


def table_row(library: str, others: dict[str, float], rounded: list[str], ours: float | None) -> dict[str, Any]:
    row = {"problem": "cells::f", "sizes": {"T": 9}, "library": library, "others": list(others), "rounded": rounded}
    row |= {"commit": "c", "gpu": "g", "versions": {}, "kernels_run": True, "eager": {"us": 900.0}}
    return row | {name: {"us": us} for name, us in others.items()} | {"ours": {} if ours is None else {"us": ours}}


def test_the_table_compares_with_the_fastest_with_and_without_rounding() -> None:
    text = compare_loops.summary(
        [
            table_row("cuDNN", {"ieee": 200.0, "tf32": 100.0}, ["tf32"], 125.0),
            table_row("cuDNN", {"ieee": 200.0, "tf32": 150.0}, ["tf32"], 100.0),
            table_row(FLA, {"chunks": 450.0}, [], None),
        ]
    )
    assert "| f T=9 | 900 | cuDNN: ieee 200, tf32 100 | 125 | 0.80 | 1.60 | -, -; - |" in text
    assert f"| f T=9 | 900 | {FLA}: chunks 450 | not delivered | 0.50 | 0.50 |" in text
    assert "cuDNN, the fastest / ours: 1.10x (geometric mean of 2); 2 at least 0.7x, 1 at least 1.0x." in text
    assert (
        "cuDNN, the fastest without TF32 / ours: 1.79x (geometric mean of 2); 2 at least 0.7x, 2 at least 1.0x." in text
    )
    assert f"{FLA}, the fastest / ours: 0.50x (geometric mean of 1); 0 at least 0.7x, 0 at least 1.0x." in text


def test_started_again_the_command_skips_the_rows_that_it_has(
    clock: SleepClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    original = compare_loops.measured

    def cases(results: Path, folder: Path, pattern: str) -> Iterator[tuple[compare_loops.Case, dict[str, Any]]]:
        assert results.name == "results.jsonl" and folder.is_dir() and pattern == "few"
        yield drawdowns({"scan": scan(100)}, 100), {"commit": "b", "status": "improved"}

    def measure(made: compare_loops.Case, clock: Any, seconds: float) -> dict[str, Any]:
        measured.append(made.problem)
        return original(made, clock, seconds)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compared, "CudaClock", lambda: clock)
    monkeypatch.setattr(compared, "provenance", lambda packages: {"commit": "c", "gpu": "g", "versions": {}})
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(compare_loops, "cases", cases)
    monkeypatch.setattr(compare_loops, "measured", measure)
    few = ["--filter", "few", "--seconds", "0.01"]
    monkeypatch.setattr(
        sys, "argv", ["compare_loops.py", "results.jsonl", "--out", str(out), *few, "--time-limit", "0"]
    )
    with monkeypatch.context() as patch:
        patch.setattr(compared, "rows_of", lambda path: [])
        assert compare_loops.main() == 0 and measured == []
    sys.argv[-2:] = []
    assert compare_loops.main() == 0 and compare_loops.main() == 0
    assert measured == ["few_states::drawdowns"]
    [row] = compared.rows_of(out)
    assert row["commit"] == "c" and row["bench_commit"] == "b" and row["scan"]["us"] and row["kernels_run"] is True
    capsys.readouterr()
    sys.argv[1:] = ["--summary", str(out)]
    assert compare_loops.main() == 0
    assert "torch, the fastest / ours: 1.0" in capsys.readouterr().out


@pytest.mark.slow
def test_the_module_of_a_delivered_version_has_the_same_parameters(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    bench = ["bench", str(LOOPS / "cells.py"), "--filter", "*GRUSteps*", "--out", str(results)]
    subprocess.run([sys.executable, "-m", "mtmc_lsp", *bench], cwd=ROOT, check=True, capture_output=True, timeout=800)
    [(found, row)] = list(compare_loops.cases(results, tmp_path, "", device="cpu"))
    assert found.problem == "cells::GRUSteps.forward" and row["status"] == "unmeasured"
    assert found.delivered is not None
    assert "@triton.jit" in Path(str(found.delivered.__file__)).read_text()
    # There is no GPU, so the guard leaves the call to the original code.
    assert found.kernels_run() is False
    small = compare_loops.Case(
        found.problem, found.workload, found.original, None, found.counterpart, {"T": 5, "B": 2, "X": 64}, "cpu"
    )
    with torch.no_grad():
        states, last = small.function(found.delivered)(**small.inputs())
        expected, expected_last = small.function(found.original)(**small.inputs())
    assert torch.equal(states, expected) and torch.equal(last, expected_last)


def test_a_row_whose_kernel_tries_many_configurations_comes_last(tmp_path: Path) -> None:
    """Otherwise a command with a time limit would end before it reaches the cells."""
    names = ["cells::linear_attention", "cells::elman", "recurrences::wkv"]
    results = tmp_path / "loops.jsonl"
    results.write_text("".join(json.dumps({"problem": name}) + "\n" for name in names))
    found = [case.problem for case, _ in compare_loops.cases(results, tmp_path, "", device="cpu")]
    assert sorted(found) == sorted(names)
    assert found[-1] == "cells::linear_attention"
