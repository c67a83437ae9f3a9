"""What a measurement is worth on this GPU: spread of repeats, A/A, a copy that is 3 % slower, and the time that it takes.

Usage: python scripts/measure_trust.py --out FILE [--repeats 20]

Each claim of the issue on measurement is tried, and told as held or not; the exit code is 0 where all of them hold. Needs a GPU
on which nothing else runs; about 6 minutes.
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
    again = int(x.shape[0] * {more})
    if again:
        # By now the first rows are no longer in the L2 cache, so they cost as much as the first time.
        scaled_kernel[(again,)](x, w, out, columns, BLOCK=block)
    return out


"""
OWN = """\
# mtmc: x=f32[N,{columns}] w=f32[{columns}] N={rows}
def scaled(x, w):
{dispatch}    return (x * 0.999 + 0.001) * w
"""
DISPATCH = (
    "    if x.is_cuda and x.dtype == torch.float32 and not x.requires_grad:\n        return scaled_launch(x, w)\n"
)
LONG_ROWS, SHORT_ROWS = 32768, 12288
"""Of a call well above 100 us on an H200, and of one of about 100 us: 1.07 GB and 0.4 GB at 4.28 TB/s."""
SLOWER_BY = 0.03
"""The slower copy does this part of its rows twice, so that it takes that much longer by construction."""


def source(rows: int, *, more: float | None = None) -> str:
    """The user's file; with ``more``, with a hand-written kernel that repeats that part of its work."""
    own = OWN.format(columns=COLUMNS, rows=rows, dispatch="" if more is None else DISPATCH)
    return f"import torch\n\n\n{own}" if more is None else KERNEL.replace("{more}", str(more)) + own


def candidate(rows: int, more: float, number: int) -> Candidate:
    """A version; the number makes each text its own, so that nothing is remembered or compiled before."""
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
        """One timing, from the start."""
        before = candidate(self.rows, previous, -number) if previous is not None else None
        timing = self.measurer.time(candidate(self.rows, more, number), before)
        assert timing is not None
        return timing

    def check_and_time(self, number: int) -> tuple[float, str]:
        """Seconds for verification and timing together, and what came of it."""
        began = time.monotonic()
        version = candidate(self.rows, 0.0, number)
        verdict = self.measurer.verify(version)
        if verdict.is_correct:
            self.measurer.time(version, None)
        return time.monotonic() - began, f"{verdict.status.value}{': ' + verdict.reason if verdict.reason else ''}"


def repeats(bench: Bench, count: int) -> dict[str, Any]:
    """The same candidate again and again: how far its ratio over eager spreads, and whether it is the same as itself."""
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


def against(bench: Bench, count: int, more: float) -> list[tuple[Speed, Ratio]]:
    """What a version that takes ``more`` longer comes to against the version before as the only rival."""
    found = []
    for number in range(count):
        timing = bench.time(1000 + number + int(more * 1e5), more=more, previous=0.0)
        ratio = timing.against("previous")
        assert ratio is not None
        found.append((speed_of(ratio, timing.noise), ratio))
    return found


def told(found: list[tuple[Speed, Ratio]]) -> dict[str, Any]:
    """Verdicts counted, and the ratios that they are about."""
    return {"speeds": dict(Counter(speed.value for speed, _ in found)), "ratios": [ratio.ratio for _, ratio in found]}


def same(bench: Bench, count: int) -> dict[str, Any]:
    """A/A: a copy against its original."""
    seen = told(against(bench, count, 0.0))
    return {**seen, "held": seen["speeds"].get("SAME", 0) >= count * 19 / 20}


def slower(bench: Bench, count: int) -> dict[str, Any]:
    """A copy that takes 3 % longer must not pass for faster, nor for the same."""
    seen = told(against(bench, count, SLOWER_BY))
    return {**seen, "held": not {"FASTER", "SAME"} & set(seen["speeds"])}


def overhead(bench: Bench, count: int) -> dict[str, Any]:
    """Verification and timing of a call of about 100 us, warm: once the workers and the references are there."""
    bench.check_and_time(1)
    found = [bench.check_and_time(number) for number in range(2, 2 + count)]
    seconds = [second for second, _ in found]
    return {"seconds": seconds, "verdicts": [told for _, told in found], "held": max(seconds) < 8.0}


def main() -> int:
    """Try each claim, and write what came of it as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    found: dict[str, Any] = {"repeats": options.repeats}
    with tempfile.TemporaryDirectory(prefix="mtmc-trust-") as folder:
        (Path(folder) / "pyproject.toml").write_text("[project]\nname = 'trust'\n")
        long, short = Bench(Path(folder), LONG_ROWS), Bench(Path(folder), SHORT_ROWS)
        try:
            if not long.measurer.has_gpu:
                print("there is no GPU here", file=sys.stderr)
                return 3
            found.update(to_json(current_build()), environment=to_json(long.capture.environment))
            parts: dict[str, Callable[[], dict[str, Any]]] = {
                "overhead": lambda: overhead(short, 3),
                "spread of repeats": lambda: repeats(long, options.repeats),
                "a copy is the same": lambda: same(long, options.repeats),
                "3 % slower is told": lambda: slower(long, options.repeats),
            }
            for name, part in parts.items():
                began = time.monotonic()
                try:
                    found[name] = {**part(), "wall_seconds": time.monotonic() - began}
                except MtmcError as error:
                    found[name] = {"held": False, "error": str(error), "wall_seconds": time.monotonic() - began}
                options.out.write_text(json.dumps(without_absolute_paths(found, Path(folder)), indent=1) + "\n")
                shown = {key: value for key, value in found[name].items() if key != "timing"}
                print(f"{'held' if found[name]['held'] else 'NOT HELD'}  {name}: {json.dumps(shown)}", flush=True)
        finally:
            long.close()
            short.close()
    return 0 if all(value["held"] for value in found.values() if isinstance(value, dict) and "held" in value) else 1


if __name__ == "__main__":
    sys.exit(main())
