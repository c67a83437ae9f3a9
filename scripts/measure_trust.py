"""Measure how reliable timings are on this GPU: spread of repeats, A/A control, a copy that is 3 % slower, and the time needed.

Usage: python scripts/measure_trust.py --out FILE [--repeats 20]

Each requirement is tested and reported as held or not; the exit code is 0 if all hold. Needs a GPU without other programs; takes
about 6 minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtmc_lsp.app.pipeline import Pipeline, RunOptions
from mtmc_lsp.app.provenance import current_build, without_absolute_paths
from mtmc_lsp.app.target_file import Request, open_target
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.results import Ratio, Speed, Timing
from mtmc_lsp.core.run import Candidate, GeneratedCode
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.local_measurer import LocalMeasurer
from mtmc_lsp.timing.worker.sampling import speed_of

COLUMNS = 4096
KERNEL = """\
import torch
import triton
import triton.language as tl


@triton.jit
def scaled_kernel(x_ptr, w_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < columns
    x = tl.load(x_ptr + row * columns + cols, mask=mask, other=0.0)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    tl.store(out_ptr + row * columns + cols, (x * 0.999 + 0.001) * w, mask=mask)


def scaled_launch(x, w):
    out = torch.empty_like(x)
    columns, block = x.shape[1], triton.next_power_of_2(x.shape[1])
    scaled_kernel[(x.shape[0],)](x, w, out, columns, BLOCK=block)
    repeated = int(x.shape[0] * {more})
    if repeated:
        # The first rows are no longer in the L2 cache, so they take as long as before.
        scaled_kernel[(repeated,)](x, w, out, columns, BLOCK=block)
    return out


"""
USER_CODE = """\
# mtmc: x=f32[N,{columns}] w=f32[{columns}] N={rows}
def scaled(x, w):
{dispatch}    return (x * 0.999 + 0.001) * w
"""
DISPATCH = (
    "    fits = all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() for t in (x, w))\n"
    "    if fits and not (x.requires_grad or w.requires_grad):\n"
    "        return scaled_launch(x, w)\n"
)
LONG_ROWS, SHORT_ROWS = 32768, 12288
"""Rows for a call of well above 100 us on an H200, and for one of about 100 us: 1.07 GB and 0.4 GB at 4.28 TB/s."""
SLOWER_BY = 0.03
"""Fraction of rows that the slower copy processes twice, so it takes this much longer by construction."""


def source(rows: int, *, more: float | None = None) -> str:
    """The user's file; with ``more``, it contains a handwritten kernel that repeats this fraction of its work."""
    user_code = USER_CODE.format(columns=COLUMNS, rows=rows, dispatch="" if more is None else DISPATCH)
    return f"import torch\n\n\n{user_code}" if more is None else KERNEL.replace("{more}", str(more)) + user_code


def candidate(rows: int, more: float, number: int) -> Candidate:
    """A version of the file; the number makes its text unique, so that no cached timing or compiled kernel is used."""
    text = f"{source(rows, more=more)}# version {number}\n"
    return Candidate(f"v{number}", None, None, text, GeneratedCode((), "", DISPATCH), None)


class Bench:
    """One workload and its measurer."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.rows = rows
        path = folder / f"scaled_{rows}.py"
        path.write_text(source(rows))
        target = open_target(Request(path, "scaled", Settings(), sys.executable))
        self._pipeline = Pipeline(target, RunOptions(fresh=True))
        self._pipeline.__enter__()
        self.capture: Capture = self._pipeline.capture()
        self.measurer: LocalMeasurer = self._pipeline.measurer()

    def close(self) -> None:
        """End the processes."""
        self._pipeline.__exit__(None, None, None)

    def time(self, number: int, more: float = 0.0, previous: float | None = None) -> Timing:
        """One timing without caches."""
        before = candidate(self.rows, previous, -number) if previous is not None else None
        timing = self.measurer.time(candidate(self.rows, more, number), before)
        assert timing is not None
        return timing

    def check_and_time(self, number: int) -> tuple[float, str]:
        """Seconds for verification and timing together, and the outcome."""
        started = time.monotonic()
        version = candidate(self.rows, 0.0, number)
        verdict = self.measurer.verify(version)
        if verdict.is_correct:
            self.measurer.time(version, None)
        return time.monotonic() - started, f"{verdict.status.value}{': ' + verdict.reason if verdict.reason else ''}"


def repeats(bench: Bench, count: int) -> dict[str, Any]:
    """Time the same candidate repeatedly: spread of its speedup over eager."""
    timings = [bench.time(number) for number in range(1, count + 1)]
    ratios = [timing.against("eager").ratio for timing in timings]  # type: ignore[union-attr]  # eager always runs
    times = [timing.median_us for timing in timings]
    return {
        "ratios": ratios,
        "medians_us": times,
        "spread": max(ratios) / min(ratios) - 1,
        "timing": to_json(timings[-1]),
        "held": max(ratios) / min(ratios) - 1 < 0.02 and min(times) > 100,
    }


def compare_with_previous(bench: Bench, count: int, more: float) -> list[tuple[Speed, Ratio]]:
    """Compare a version that takes ``more`` longer with the previous version as the only baseline."""
    comparisons = []
    for number in range(count):
        timing = bench.time(1000 + number + int(more * 1e5), more=more, previous=0.0)
        ratio = timing.against("previous")
        assert ratio is not None
        comparisons.append((speed_of(ratio, timing.noise), ratio))
    return comparisons


def summarise_comparisons(comparisons: list[tuple[Speed, Ratio]]) -> dict[str, Any]:
    """Counts of the verdicts, and their ratios."""
    return {
        "speeds": dict(Counter(speed.value for speed, _ in comparisons)),
        "ratios": [ratio.ratio for _, ratio in comparisons],
    }


def aa_control(bench: Bench, count: int) -> dict[str, Any]:
    """A/A control: compare a copy with its original."""
    summary = summarise_comparisons(compare_with_previous(bench, count, 0.0))
    return {**summary, "held": summary["speeds"].get("SAME", 0) >= count * 19 / 20}


def slower(bench: Bench, count: int) -> dict[str, Any]:
    """A copy that takes 3 % longer must not be reported as faster or the same."""
    summary = summarise_comparisons(compare_with_previous(bench, count, SLOWER_BY))
    return {**summary, "held": not {"FASTER", "SAME"} & set(summary["speeds"])}


def overhead(bench: Bench, count: int) -> dict[str, Any]:
    """Verification and timing of a call of about 100 us, with running workers and cached references."""
    bench.check_and_time(1)
    runs = [bench.check_and_time(number) for number in range(2, 2 + count)]
    seconds = [second for second, _ in runs]
    return {
        "seconds": seconds,
        "verdicts": [outcome for _, outcome in runs],
        "held": max(seconds) < 8.0 and all(outcome == "correct" for _, outcome in runs),
    }


def main() -> int:
    """Test each requirement and write each result immediately."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    report: dict[str, Any] = {"repeats": options.repeats}
    with tempfile.TemporaryDirectory(prefix="mtmc-trust-") as folder:
        (Path(folder) / "pyproject.toml").write_text("[project]\nname = 'trust'\n")
        long, short = Bench(Path(folder), LONG_ROWS), Bench(Path(folder), SHORT_ROWS)
        try:
            if not long.measurer.has_gpu:
                print("this machine has no GPU", file=sys.stderr)
                return 3
            report.update(to_json(current_build()), environment=to_json(long.capture.environment))
            parts: dict[str, Callable[[], dict[str, Any]]] = {
                "overhead": lambda: overhead(short, 3),
                "spread of repeats": lambda: repeats(long, options.repeats),
                "A/A control": lambda: aa_control(long, options.repeats),
                "3 % slower is detected": lambda: slower(long, options.repeats),
            }
            for name, part in parts.items():
                started = time.monotonic()
                try:
                    report[name] = {**part(), "wall_seconds": time.monotonic() - started}
                except MtmcError as error:
                    report[name] = {"held": False, "error": str(error), "wall_seconds": time.monotonic() - started}
                options.out.write_text(json.dumps(without_absolute_paths(report, Path(folder)), indent=1) + "\n")
                printed = {key: value for key, value in report[name].items() if key != "timing"}
                print(f"{'held' if report[name]['held'] else 'NOT HELD'}  {name}: {json.dumps(printed)}", flush=True)
        finally:
            long.close()
            short.close()
    return 0 if all(value["held"] for value in report.values() if isinstance(value, dict) and "held" in value) else 1


if __name__ == "__main__":
    sys.exit(main())
