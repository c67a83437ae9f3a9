"""Compare KernelBench's own verdict with `mtmc verify`'s, for every pair NAME.py and NAME_new.py of a folder.

    python scripts/compare_kernelbench.py KERNELBENCH FOLDER [--results FILE] [--jobs N] [--json FILE]

KERNELBENCH is a checkout of github.com/ScalingIntelligence/KernelBench; its evaluator is imported from there, with what it
needs installed. On a CUDA GPU its ``eval_kernel_against_ref`` runs as it is, at its own tolerance, at 1e-2, which its first
versions used, and at its own with TF32 switched off. Without one, its correctness part runs on the CPU under Triton's
interpreter, at the sizes of ``get_inputs``: keep them small. With ``--results`` our verdicts are those that ``mtmc bench`` gave
the versions it kept, whose exported files the pairs are. The exit code is 1 where they disagree.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TRIALS = 5
SEED = 42
SECONDS = 1800
LOOSE = 1e-2
CLIENTS = {"litellm": "completion", "openai": "OpenAI"}
"""Packages that KernelBench asks language models with, and what it imports of them; to judge, neither is needed."""


def main() -> int:
    """Compare every pair, or judge one as KernelBench does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernelbench", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="where to write one line of JSON for each pair")
    parser.add_argument(
        "--results", type=Path, help="what `mtmc bench` wrote, in the place of verifying each pair again"
    )
    parser.add_argument("--jobs", type=int, default=1, help="pairs at a time")
    parser.add_argument("--judge", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge:
        options.folder.write_text(json.dumps(theirs(options.kernelbench, *options.judge)), encoding="utf-8")
        return 0
    pairs = [(path, path.with_name(f"{path.stem}_new.py")) for path in sorted(options.folder.glob("*.py"))]
    pairs = [pair for pair in pairs if pair[1].exists()]
    known = verdicts(options.results) if options.results else {}

    def compared(pair: tuple[Path, Path]) -> dict[str, Any]:
        mine = known.get(pair[0].stem) if options.results else ours(*pair)
        other = asked(options.kernelbench, *pair)
        mine = mine or {"status": "error", "reason": f"{options.results} has no such problem"}
        agree = (mine["status"] == "correct") == other.get("correct")
        return {"problem": pair[0].stem, "mtmc": mine, "kernelbench": other, "agree": agree}

    found = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(compared, pairs):
            found.append(row)
            print(f"{row['problem']:40} {told(row)}", flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    same = sum(row["agree"] for row in found)
    print(f"{same} of {len(found)} verdicts agree")
    return 0 if same == len(found) else 1


def told(row: dict[str, Any]) -> str:
    """A pair's row in words."""
    mine, other = row["mtmc"], row["kernelbench"]
    loose = f", at {LOOSE}: {other['loose']}, without TF32: {other['without TF32']}" if "loose" in other else ""
    verdict = f"mtmc: {mine['status']}, KernelBench: {other.get('correct')}{loose}"
    why = mine["reason"] or str(other.get("why", ""))
    return verdict if row["agree"] else f"{verdict}  DISAGREE  {why}"


def verdicts(results: Path) -> dict[str, dict[str, str]]:
    """By file name, the verdict on the last version that a bench kept; of ``level1/name`` it is ``level1_name``."""
    found: dict[str, dict[str, str]] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kept = [step for step in row.get("steps") or () if step["status"] == "accepted"]
        if kept:
            verdict = kept[-1]["verdict"]
            found[row["problem"].replace("/", "_").replace("::", "__")] = {
                "status": verdict["status"],
                "reason": verdict["reason"],
            }
    return found


def ours(reference: Path, candidate: Path) -> dict[str, str]:
    """The status and the reason that ``mtmc verify`` gives."""
    command = [sys.executable, "-m", "mtmc_lsp", "verify", str(reference), str(candidate), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    document = json.loads(done.stdout)
    if "verdict" not in document:
        return {"status": "error", "reason": str(document["error"]["message"])}
    return {"status": document["verdict"]["status"], "reason": document["verdict"]["reason"]}


def asked(kernelbench: Path, reference: Path, candidate: Path) -> dict[str, Any]:
    """KernelBench's answer, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, str(kernelbench), str(answer), "--judge", str(reference), str(candidate)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if not answer.exists():
            return {"correct": None, "why": done.stderr.strip().splitlines()[-1:]}
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return result


def theirs(kernelbench: Path, reference: Path, candidate: Path) -> dict[str, Any]:
    """What KernelBench's evaluator says."""
    import torch

    gpu = torch.cuda.is_available()
    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(kernelbench / "src"))
    for name, attribute in CLIENTS.items():
        if importlib.util.find_spec(name) is None:
            client = types.ModuleType(name)
            client.__dict__[attribute] = None
            sys.modules[name] = client
    from kernelbench import eval as evaluator

    texts = reference.read_text(encoding="utf-8"), candidate.read_text(encoding="utf-8")
    judge = _on_gpu if gpu else _on_cpu
    with contextlib.redirect_stdout(io.StringIO()):
        strict = judge(evaluator, *texts)
        if not gpu:
            return strict
        tolerance = evaluator.get_tolerance_for_precision
        evaluator.get_tolerance_for_precision = lambda precision: LOOSE
        loose = strict["correct"] or judge(evaluator, *texts)["correct"]
        evaluator.get_tolerance_for_precision = tolerance
        # The reference without TF32, which cuDNN may use otherwise: what rounds as TF32 does is then further off.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        return {**strict, "loose": loose, "without TF32": judge(evaluator, *texts)["correct"]}


def _on_gpu(evaluator: Any, reference: str, candidate: str) -> dict[str, Any]:
    found = evaluator.eval_kernel_against_ref(
        reference, candidate, seed_num=SEED, num_correct_trials=TRIALS, backend="triton"
    )
    return {"correct": bool(found and found.correctness), "why": str(found.metadata if found else "no answer")}


def _on_cpu(evaluator: Any, reference: str, candidate: str) -> dict[str, Any]:
    import torch

    from mtmc_lsp.verify.worker.interpreter.patches import patch_interpreter
    from mtmc_lsp.verify.worker.interpreter.source import on_cpu

    patch_interpreter()
    torch.cuda.synchronize = lambda device=None: None
    kind, init, inputs = evaluator.load_original_model_and_inputs(reference, {})
    new, file = evaluator.load_custom_model_with_tempfile(on_cpu(candidate, ""))
    try:
        models = []
        for each in (kind, new):
            evaluator.set_seed(SEED)
            models.append(each(*init()))
        found = evaluator.run_and_check_correctness(
            *models, inputs, {}, TRIALS, seed=SEED, device=torch.device("cpu"), backend="triton"
        )
    finally:
        os.unlink(file.name)
    return {"correct": bool(found.correctness), "why": str(found.metadata)}


if __name__ == "__main__":
    sys.exit(main())
