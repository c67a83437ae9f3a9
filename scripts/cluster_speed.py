"""How much faster a bench is with several workers of a local cluster, with recorded times instead of a GPU.

``python scripts/cluster_speed.py RESULTS... --out FILE [--problems 100] [--workers 4] [--scale 0.1]`` solves the problems of
recorded results of ``mtmc bench`` twice, with one worker and with several. All of it is ``mtmc bench --cluster local:N``, but the
process of a problem waits for the recorded seconds times ``--scale`` and then answers with the recorded result. So the ratio
contains the time of the cluster, of the processes and of the file of results, and no contention for a GPU or a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtmc_lsp.app.bench.runner import Bench, Plan, read_results
from mtmc_lsp.app.bench.suite import find_problems
from mtmc_lsp.app.provenance import current_build
from mtmc_lsp.cluster.address import ClusterAddress
from mtmc_lsp.cluster.imports import bundle_of
from mtmc_lsp.cluster.machine import CPU
from mtmc_lsp.cluster.results import cluster_plan
from mtmc_lsp.cluster.session import connect
from mtmc_lsp.core.settings import Settings

PROBLEM = "import torch\n\n\nclass Model(torch.nn.Module):\n    pass\n\n\ndef get_inputs():\n    return []\n"
RECORD = "# record: "
# The process of a problem: its file contains the recorded seconds and result.
REPLAY = f"""
import json, pathlib, sys, time
request = json.load(sys.stdin)
text = pathlib.Path(request["path"]).read_text()
record = json.loads(text.rpartition({RECORD!r})[2])
time.sleep(record["seconds"])
pathlib.Path(sys.argv[1]).write_text(json.dumps(record["answer"]))
"""
HEAD = ("schema", "version", "commit", "problem", "level", "key", "wall_seconds")


def write_suite(folder: Path, records: Sequence[dict[str, Any]], scale: float) -> None:
    """Write a file for each record, with its seconds and its result."""
    for number, record in enumerate(records):
        answer = {name: value for name, value in record.items() if name not in HEAD}
        line = json.dumps({"seconds": record["wall_seconds"] * scale, "answer": answer})
        (folder / f"{number}.py").write_text(f"{PROBLEM}{RECORD}{line}\n")


def measure(suite: Path, workers: int) -> tuple[float, int]:
    """The seconds of a bench with this number of workers, without the start of the cluster, and its number of results."""
    problems, settings = find_problems(suite), Settings()
    bundle, address = bundle_of(problems, settings), ClusterAddress(f"local:{workers}", workers)
    with tempfile.TemporaryDirectory() as folder, connect(address, bundle, sys.executable, forks=False) as session:
        plan = cluster_plan(Plan(settings, sys.executable, 600.0, {}), session.software, CPU)
        out, began = Path(folder) / "results.jsonl", time.monotonic()
        bench = Bench(plan, out, session.jobs(CPU), program=(sys.executable, "-c", REPLAY))
        for _ in bench.run(problems):
            pass
        return time.monotonic() - began, len(read_results(out))


def main() -> None:
    """Measure both, print the ratio and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--scale", type=float, default=0.1)
    options = parser.parse_args()
    records = [record for path in options.results for record in read_results(path)][: options.problems]
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        write_suite(Path(folder), records, options.scale)
        for workers in (1, options.workers):
            seconds[workers], count = measure(Path(folder), workers)
            assert count == len(records), f"{count} results of {len(records)} problems"
            print(f"{workers} workers: {count} problems in {seconds[workers]:.1f} s", flush=True)
    ratio = seconds[1] / seconds[options.workers]
    measured = {
        **asdict(current_build()),
        "problems": len(records),
        "results": [path.name for path in options.results],
        "scale": options.scale,
        "simulated_seconds": round(sum(record["wall_seconds"] for record in records) * options.scale, 1),
        "seconds": {str(workers): round(value, 2) for workers, value in seconds.items()},
        "ratio": round(ratio, 3),
    }
    options.out.write_text(json.dumps(measured, indent=1) + "\n")
    print(f"{ratio:.2f}x as fast with {options.workers} workers")


if __name__ == "__main__":
    main()
