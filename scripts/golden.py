"""Generate the golden pairs of ``tests/golden`` and the pages that show them, or check that they are up to date.

    python scripts/golden.py            # check: lists the files that are out of date; needs no torch
    python scripts/golden.py --write    # capture every before.py again, then write graph.json, after.py and the pages

``--write --stored`` renders from the stored graphs: no torch, a few seconds. That is enough after a change of generated code or
of docstrings; after a change of ``before.py``, of the capture or of the graph's format, run ``--write`` alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtmc_lsp.capture.client import find_workload, run_capture  # noqa: E402
from mtmc_lsp.core.workload import Capture  # noqa: E402
from mtmc_lsp.process.worker_process import Worker  # noqa: E402
from mtmc_lsp.source.targets import find_target  # noqa: E402
from tests.golden.pages import generated  # noqa: E402
from tests.golden.pairs import pairs, sibling_example  # noqa: E402

CAPTURE_SECONDS = 120.0


def main() -> int:
    """Run the command; the exit status is 1 where the check finds files that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the files instead of checking them")
    parser.add_argument("--stored", action="store_true", help="keep graph.json: no torch is needed")
    arguments = parser.parse_args()
    if arguments.write and not arguments.stored:
        capture_all()
    files = {path: text for pair in pairs() for path, text in generated(pair).items()} | sibling_example()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if arguments.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        print(f"{'written' if arguments.write else 'out of date'}: {path.relative_to(ROOT)}")
    return 1 if stale and not arguments.write else 0


def capture_all() -> None:
    """Capture every ``before.py`` under Triton's interpreter, in a project that holds nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text("[project]\nname = 'user'\n", encoding="utf-8")
        path = Path(folder) / "model.py"
        worker = Worker(sys.executable, cwd=folder, env={"TRITON_INTERPRET": "1"})

        def capture(text: str, name: str) -> Capture:
            path.write_text(text, encoding="utf-8")
            source = path.read_bytes()
            workload = find_workload(str(path), source, find_target(source, str(path), name))
            return run_capture(workload, source, worker, CAPTURE_SECONDS)

        try:
            for pair in pairs():
                pair.store(pair.captured(capture))
        finally:
            worker.close()


if __name__ == "__main__":
    sys.exit(main())
