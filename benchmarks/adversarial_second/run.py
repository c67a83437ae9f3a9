"""``python -m benchmarks.adversarial_second.run --out FILE`` verifies each candidate with ``mtmc verify`` and counts the answers."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.adversarial_second.cases import REFERENCES, Case, all_cases
from mtmc_lsp.core.results import label_of

LIMIT = 60.0
CERTIFIED = ("correct", "correct_at_reduced_sizes")


def commit() -> str:
    """The tool's commit: ``MTMC_COMMIT``, or what git says of this checkout."""
    if "MTMC_COMMIT" in os.environ:
        return os.environ["MTMC_COMMIT"]
    command = ["git", "-C", str(REFERENCES.parent), "log", "-1", "--format=%h"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def answer(command: list[str], folder: Path, limit: float) -> tuple[int | None, str, str]:
    """Exit code (``None``: the limit passed), output and errors of a command; its processes end with it."""
    with subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, "", f"no verdict within {limit:.0f} s"
    return process.returncode, output, errors


def verify(case: Case, limit: float) -> dict[str, Any]:
    """One line of the results: what the tool answers to this candidate."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(REFERENCES, folder / "reference.py")
        (folder / "candidate.py").write_text(case.text())
        command = [sys.executable, "-m", "mtmc_lsp", "verify", "--json"]
        command += [f"reference.py::{case.target}", f"candidate.py::{case.target}"]
        code, output, errors = answer(command, folder, limit)
        try:
            verdict = json.loads(output)["verdict"]
        except (ValueError, KeyError):
            verdict = {"status": "no verdict", "reason": errors.strip()[-300:]}
        share = verdict.get("library_share")
        reason = str(verdict.get("reason") or "").replace(str(folder), "FOLDER")
    label = label_of(share)
    print(f"{case.kind}/{case.name}: {verdict['status']} {label}", file=sys.stderr)
    return {
        "class": case.kind, "name": case.name, "expected": case.expected, "status": verdict["status"], "exit_code": code,
        "label": label, "seconds": round(time.monotonic() - began, 1), "reason": reason[:400],
    }  # fmt: skip


def outcome(record: dict[str, Any]) -> str:
    """``certified``, ``labelled`` (certified as other than a kernel), ``refused``, or ``no verdict``."""
    if record["status"] in CERTIFIED:
        return "labelled" if record["label"] in ("library", "mixed") else "certified"
    return "no verdict" if record["status"] == "no verdict" else "refused"


def summary(records: list[dict[str, Any]]) -> str:
    """A table of the outcomes by class."""
    rows = [("class", "candidates", "refused", "labelled", "certified", "no verdict")]
    for kind in dict.fromkeys(record["class"] for record in records):
        counts = Counter(outcome(record) for record in records if record["class"] == kind)
        rows.append((kind, str(counts.total()), *(str(counts[column]) for column in rows[0][2:])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def as_expected(record: dict[str, Any]) -> bool:
    """Whether the tool answered as it should."""
    good = {"refused": ("refused",), "caught": ("refused", "labelled"), "certified": ("certified",)}
    return outcome(record) in good[record["expected"]]


def main() -> int:
    """Runs the chosen candidates that have no line in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--class", dest="kinds", action="append", default=[], help="only this class (may be repeated)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one candidate")
    parser.add_argument(
        "--order", type=int, help="in a random order by this seed: an interrupted run is a random share"
    )
    parser.add_argument("--out", type=Path, required=True, help="one line for each candidate; start again to resume")
    options = parser.parse_args()
    records = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(record["class"], record["name"]) for record in records}
    cases = [case for case in all_cases() if not options.kinds or case.kind in options.kinds]
    if options.order is not None:
        random.Random(options.order).shuffle(cases)
    tool = {"commit": commit()}
    with ThreadPoolExecutor(options.jobs) as pool, options.out.open("a") as file:
        waiting = [case for case in cases if (case.kind, case.name) not in done]
        for record in pool.map(lambda case: verify(case, options.limit), waiting):
            records.append({**record, **tool})
            file.write(json.dumps(records[-1]) + "\n")
            file.flush()
    order = list(dict.fromkeys(case.kind for case in all_cases()))
    records.sort(key=lambda record: order.index(record["class"]))
    print(summary(records))
    unexpected = [record for record in records if not as_expected(record)]
    for record in unexpected:
        print(f"{record['class']}/{record['name']}: {outcome(record)} ({record['status']}) {record['reason'][:150]}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    raise SystemExit(main())
