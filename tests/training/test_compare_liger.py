"""The comparison with Liger-Kernel: the same math is compared, files that stay as they were count as eager mode."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtmc_lsp.process.module_files import load_file
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive
from tests.verify.clocks import SleepClock

torch = pytest.importorskip("torch")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.append(str(SCRIPTS))
import compare_liger  # noqa: E402
from liger_counterparts import COUNTERPARTS  # noqa: E402

Norm = Callable[..., Any]
ROOT = SCRIPTS.parent


def exact(x: Any, weight: Any, eps: float) -> Any:
    """The norm, by torch's function."""
    time.sleep(300e-6)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def liger(norm: Norm) -> Callable[[], Any]:
    """Liger-Kernel with this norm; its library needs a GPU."""
    return lambda: SimpleNamespace(functions=SimpleNamespace(liger_rms_norm=norm))


def case(delivered: Any = None) -> compare_liger.Case:
    path = compare_liger.SUITE / "norms_and_gates.py"
    text = path.read_bytes()
    workload = parse_directive(text, find_target(text, str(path), "rms_norm"), str(path))
    assert workload is not None
    original = load_file(path).rms_norm
    problem = "norms_and_gates::rms_norm"
    return compare_liger.Case(
        problem, {"N": 8, "H": 64}, workload, original, delivered, COUNTERPARTS[problem], device="cpu"
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SleepClock:
    """A clock that counts sleeps; ``torch.compile`` returns the function, which a sleep makes slower."""
    made = SleepClock()
    made.install(monkeypatch)

    def compiled(function: Norm) -> Norm:
        def slower(*inputs: Any) -> Any:
            time.sleep(100e-6)
            return function(*inputs)

        return slower

    monkeypatch.setattr(torch, "compile", compiled)
    return made


def test_each_contender_is_compared_with_eager_mode_and_timed(clock: SleepClock) -> None:
    fast = SimpleNamespace(rms_norm=lambda x, weight: exact(x, weight, 1e-6), rms_norm_fits=lambda x, weight: True)
    row = compare_liger.measured(case(fast), liger(exact), clock, 0.2)
    assert [row[name].get("error") for name in compare_liger.CONTENDERS] == [None] * 4
    assert 0 < row["liger"]["distance"] < compare_liger.SAME
    times = [row[name]["us"] for name in compare_liger.CONTENDERS]
    assert times == pytest.approx([100, 200, 400, 400], rel=0.05)
    assert row["kernels_run"] is True
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, weight, eps: exact(x, weight, eps) * 1.05,
        lambda x, weight, eps: exact(x, weight.detach() + 0 * weight, eps),
    ],
    ids=["result", "gradient"],
)
def test_other_math_gets_no_time(clock: SleepClock, wrong: Norm) -> None:
    row = compare_liger.measured(case(), liger(wrong), clock, 0.2)
    assert "differ from those of eager mode" in row["liger"]["error"]
    assert "us" not in row["liger"] and row["eager"]["us"] and row["compile"]["us"]


def test_a_contender_that_fails_does_not_end_the_row(clock: SleepClock) -> None:
    def absent(x: Any, weight: Any, eps: float) -> Any:
        raise ImportError("not in this version")

    row = compare_liger.measured(case(), liger(absent), clock, 0.2)
    assert row["liger"] == {"error": "ImportError: not in this version"}
    assert row["eager"]["us"] and row["ours"] == {}


def test_nan_differs_from_every_number() -> None:
    assert compare_liger.distance([torch.tensor([math.nan])], [torch.ones(1)]) == math.inf
    assert compare_liger.distance([torch.ones(2)], [torch.ones(1)]) == math.inf
    assert compare_liger.distance([torch.ones(4) * 1.01], [torch.ones(4)]) == pytest.approx(0.01, rel=1e-3)


def table_row(**times: float) -> dict[str, Any]:
    row: dict[str, Any] = {name: {} for name in compare_liger.CONTENDERS}
    row |= {
        "problem": "losses::focal",
        "sizes": {"N": 1},
        "commit": "c",
        "gpu": "g",
        "versions": {},
        "kernels_run": True,
    }
    return row | {name: {"us": us, "graph_us": None, "peak_bytes": 2**20} for name, us in times.items()}


def test_the_table_compares_with_the_best_and_counts_what_was_not_delivered_as_eager() -> None:
    text = compare_liger.summary(
        [table_row(eager=400, compile=200, liger=100, ours=50), table_row(eager=400, compile=200, liger=100)]
    )
    assert "| focal N=1 | 400 | 200 | 100 | 50 | 2.00 | -, -, -, - | 1, 1, 1, 1 |" in text
    assert "| focal N=1 | 400 | 200 | 100 | not delivered | 0.25 |" in text
    assert "over the best of the others: 0.71x (geometric mean of 2); 1 at least 1.0x." in text
    assert "over eager: 2.83x" in text


def test_the_inputs_suit_what_liger_computes() -> None:
    name = "norms_and_gates::rotary"
    path = compare_liger.SUITE / "norms_and_gates.py"
    text = path.read_bytes()
    workload = parse_directive(text, find_target(text, str(path), "rotary"), str(path))
    assert workload is not None
    rotary = compare_liger.Case(name, {"B": 2, "S": 4}, workload, exact, None, COUNTERPARTS[name], device="cpu")
    ours, theirs = rotary.inputs(), rotary.for_liger()
    assert torch.equal(ours["cos"][..., :64], ours["cos"][..., 64:])
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert theirs["q"].transpose(1, 2).is_contiguous() and ours["q"].is_contiguous()


@pytest.mark.slow
def test_the_delivered_code_comes_from_the_store_beside_the_results(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    bench = ["bench", str(compare_liger.SUITE / "norms_and_gates.py"), "--filter", "*::swiglu", "--out", str(results)]
    subprocess.run([sys.executable, "-m", "mtmc_lsp", *bench], cwd=ROOT, check=True, capture_output=True, timeout=800)
    [(found, row)] = list(compare_liger.cases(results, tmp_path, "", device="cpu"))
    assert found.problem == "norms_and_gates::swiglu" and row["status"] == "unmeasured"
    assert found.delivered is not None
    # There is no GPU, so the guard leaves the call to the original code.
    assert found.kernels_run() is False
    ours = found.function_of_ours()
    assert ours is not None
    small = compare_liger.Case(
        found.problem, {"N": 4, "I": 16}, found.workload, found.original, None, found.counterpart, "cpu"
    )
    expected = compare_liger.BothPasses(found.original, small.inputs(), small.trained)()
    assert compare_liger.distance(compare_liger.BothPasses(ours, small.inputs(), small.trained)(), expected) == 0.0
    assert "@triton.jit" in Path(str(found.delivered.__file__)).read_text()
    assert json.loads(results.read_text())["id"]
