"""Run `mtmc verify` on the candidates: `python -m benchmarks.adversarial.run [--check] [--every N] [--only TEXT] [--out FILE]`."""

import argparse
import collections
import concurrent.futures
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.adversarial.candidate import Candidate
from benchmarks.adversarial.honest import honest
from benchmarks.adversarial.probes import fakes, harness, probing
from benchmarks.adversarial.witness import check, write
from benchmarks.adversarial.wrong import wrong

ROOT = Path(__file__).resolve().parents[2]


def suite() -> list[Candidate]:
    """Return all candidates."""
    return [*wrong(), *harness(), *probing(), *fakes(), *honest()]


def verify(candidate: Candidate, limit: int, gpu: bool, commit: str) -> dict[str, Any]:
    """Run `mtmc verify` on one candidate and return its line."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="model") as folder:
        reference, fast = write(candidate, Path(folder))
        pair = [f"{path}::{candidate.target}" for path in (reference, fast)]
        environment = {**os.environ, **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})}
        command = [sys.executable, "-m", "mtmc_lsp", "verify", *pair, "--json"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, cwd=ROOT, env=environment, check=False
            )
            verdict = json.loads(done.stdout)["verdict"]
            status, reason = verdict["status"], verdict.get("reason") or done.stderr.strip()[-300:]
            # Not above: the witnesses run in this process, and some candidates look for our modules.
            from mtmc_lsp.core.results import label_of

            label = label_of(verdict.get("library_share"))
        except subprocess.TimeoutExpired:
            status, reason, label = "no answer", f"not within {limit} s", ""
        except (ValueError, KeyError):
            status, reason, label = "no verdict", (done.stderr or done.stdout).strip()[-300:], ""
        reason = str(reason).replace(folder, "").replace(str(ROOT), "")
    seconds = round(time.monotonic() - started, 1)
    return {
        "name": candidate.name, "class": candidate.kind, "status": status, "label": label,
        "seconds": seconds, "reason": reason, "commit": commit, "gpu": gpu,
    }  # fmt: skip


def right(line: dict[str, Any]) -> bool:
    """Tell whether a verdict is what the candidate deserves; no verdict at all never is."""
    if line["status"] in ("no answer", "no verdict"):
        return False
    certified = line["status"].startswith("correct") and line["label"] not in ("library", "mixed")
    return bool(certified == (line["class"] == "honest"))


def summary(lines: list[dict[str, Any]]) -> str:
    """Return a table by class."""
    by_class: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for line in lines:
        by_class[line["class"]].append(line)
    rows = ["| class | candidates | judged rightly | judged wrongly |", "|---|---|---|---|"]
    for kind, some in by_class.items():
        good = sum(map(right, some))
        rows.append(f"| {kind} | {len(some)} | {good} | {len(some) - good} |")
    return "\n".join(rows)


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="run the witnesses instead, without the verifier")
    parser.add_argument("--every", type=int, default=1, help="take each Nth candidate of each class")
    parser.add_argument("--only", default="", help="take names that contain this")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--time-limit", type=int, default=120, help="seconds for each")
    parser.add_argument("--gpu", action="store_true", help="verify on the GPU; else by the interpreter")
    parser.add_argument(
        "--order", type=int, help="in a random order by this seed: an interrupted run is a random share"
    )
    parser.add_argument("--out", type=Path, help="append one JSON line for each; start again to resume")
    options = parser.parse_args()
    seen: collections.Counter[str] = collections.Counter()
    turns = []  # one of each class after the other: an interrupted run says something of each
    for candidate in suite():
        if options.only in candidate.name:
            seen[candidate.kind] += 1
            if seen[candidate.kind] % options.every == 0:
                turns.append((seen[candidate.kind], candidate))
    if options.order is not None:
        random.Random(options.order).shuffle(turns)
    else:
        turns.sort(key=lambda turn: turn[0])
    chosen = [candidate for _, candidate in turns]
    if options.check:
        return _check(chosen)
    commit = os.environ.get("MTMC_COMMIT") or _commit()
    lines = []
    if options.out and options.out.exists():
        lines = [json.loads(text) for text in options.out.read_text(encoding="utf-8").splitlines()]
        names = {line["name"] for line in lines}
        chosen = [candidate for candidate in chosen if candidate.name not in names]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(verify, one, options.time_limit, options.gpu, commit) for one in chosen]
        for future in concurrent.futures.as_completed(futures):
            line = future.result()
            lines.append(line)
            print("ok  " if right(line) else "MISS", line["name"], line["status"], line["seconds"], flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    print(summary(lines))
    return 0


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _check(chosen: list[Candidate]) -> int:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton.language  # noqa: F401

    torch.set_num_threads(2)
    failed = 0
    for candidate in chosen:
        if message := check(candidate):
            failed += 1
            print(f"{candidate.name}: {message}", flush=True)
    print(f"{len(chosen)} checked, {failed} not as the suite says")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
