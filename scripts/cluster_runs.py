"""How much faster one run gets with several workers: ``mtmc optimize`` of a target on clusters of this machine.

    python scripts/cluster_runs.py FILE::NAME --workers 1 2 4 --out FILE [--budget SECONDS]

Each count of workers runs once, from an empty store. The result has the wall time, the number of steps and the speedup of each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mtmc_lsp.app.provenance import current_build
from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.process.project_files import FOLDER


def run(project: Path, spec: str, workers: int, budget: float) -> dict[str, Any]:
    """One run in a copy of the project.

    Raises:
        SystemExit: the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="mtmc-cluster-runs-") as folder:
        copy = Path(folder) / project.name
        shutil.copytree(project, copy, ignore=shutil.ignore_patterns(FOLDER, ".git", ".venv"))
        command = ["optimize", spec, "--fresh", "--json", "--budget", str(budget), "--cluster", f"local:{workers}"]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "mtmc_lsp", *command], cwd=copy, capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - began
    if not done.stdout:
        sys.exit(done.stderr)
    result = json.loads(done.stdout)
    return {
        "workers": workers,
        "seconds": round(seconds, 1),
        "status": result["status"],
        "steps": len(result["steps"]),
        "accepted": sum(step["status"] == "accepted" for step in result["steps"]),
        "speedup": result["final"]["speedup"],
        "gpu": result["environment"]["gpu"],
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", metavar="FILE::NAME")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--budget", type=float, default=300.0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    file, _, name = arguments.spec.partition("::")
    project = project_root(Path(file).absolute())
    spec = f"{Path(file).absolute().relative_to(project)}::{name}"
    runs = []
    for workers in arguments.workers:
        runs.append(run(project, spec, workers, arguments.budget))
        print(runs[-1], file=sys.stderr)
    document = {"target": spec, "budget": arguments.budget, "build": to_json(current_build()), "runs": runs}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
