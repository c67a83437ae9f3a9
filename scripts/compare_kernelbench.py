"""Compare the verdicts of KernelBench and `mtmc verify` for every pair NAME.py and NAME_new.py in a folder.

    python scripts/compare_kernelbench.py KERNELBENCH FOLDER [--results FILE] [--jobs N] [--json FILE]

KERNELBENCH is a checkout of github.com/ScalingIntelligence/KernelBench with its dependencies installed; its evaluator is imported
from there. On a CUDA GPU, ``eval_kernel_against_ref`` runs unchanged three times: with its own tolerance, with 1e-2 (used by its
first versions), and with its own tolerance and TF32 disabled. Without a GPU, its correctness part runs on the CPU with Triton's
interpreter, at the sizes of ``get_inputs``: keep them small. With ``--results``, our verdicts are read from the results of
``mtmc bench``, whose exported files are the pairs. The exit code is 1 if any verdicts differ.
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

from mtmc_lsp.process.isolation import isolated_command

TRIALS = 5
SEED = 42
TIMEOUT_SECONDS = 1800
LOOSE_TOLERANCE = 1e-2
CLIENTS = {"litellm": "completion", "openai": "OpenAI"}
"""Packages that KernelBench uses to call language models, and the names it imports from them. Not needed for evaluation."""


def main() -> int:
    """Compare all pairs, or evaluate one pair with KernelBench (internal option --judge)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernelbench", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="output file, one line of JSON per pair")
    parser.add_argument(
        "--results", type=Path, help="results file of `mtmc bench`, used instead of verifying each pair again"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of pairs to compare in parallel")
    parser.add_argument("--judge", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge:
        options.folder.write_text(
            json.dumps(kernelbench_verdict(options.kernelbench, *options.judge)), encoding="utf-8"
        )
        return 0
    pairs = [(path, path.with_name(f"{path.stem}_new.py")) for path in sorted(options.folder.glob("*.py"))]
    pairs = [pair for pair in pairs if pair[1].exists()]
    stored_verdicts = verdicts(options.results) if options.results else {}

    def compare(pair: tuple[Path, Path]) -> dict[str, Any]:
        mtmc = stored_verdicts.get(pair[0].stem) if options.results else mtmc_verdict(*pair)
        kernelbench = run_kernelbench(options.kernelbench, *pair)
        mtmc = mtmc or {"status": "error", "reason": f"{options.results} does not contain this problem"}
        agree = (mtmc["status"] == "correct") == kernelbench.get("correct")
        return {"problem": pair[0].stem, "mtmc": mtmc, "kernelbench": kernelbench, "agree": agree}

    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(compare, pairs):
            rows.append(row)
            print(f"{row['problem']:40} {describe(row)}", flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    agreeing = sum(row["agree"] for row in rows)
    print(f"{agreeing} of {len(rows)} verdicts agree")
    return 0 if agreeing == len(rows) else 1


def describe(row: dict[str, Any]) -> str:
    """Description of a pair's row."""
    mtmc, kernelbench = row["mtmc"], row["kernelbench"]
    loose = (
        f", at {LOOSE_TOLERANCE}: {kernelbench['loose']}, without TF32: {kernelbench['without TF32']}"
        if "loose" in kernelbench
        else ""
    )
    verdict = f"mtmc: {mtmc['status']}, KernelBench: {kernelbench.get('correct')}{loose}"
    reason = mtmc["reason"] or str(kernelbench.get("why", ""))
    return verdict if row["agree"] else f"{verdict}  DISAGREE  {reason}"


def verdicts(results: Path) -> dict[str, dict[str, str]]:
    """Verdict on the last accepted version of each problem, by file name: ``level1/name`` becomes ``level1_name``."""
    verdicts_by_name: dict[str, dict[str, str]] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        accepted = [step for step in row.get("steps") or () if step["status"] == "accepted"]
        if accepted:
            verdict = accepted[-1]["verdict"]
            verdicts_by_name[row["problem"].replace("/", "_").replace("::", "__")] = {
                "status": verdict["status"],
                "reason": verdict["reason"],
            }
    return verdicts_by_name


def mtmc_verdict(reference: Path, candidate: Path) -> dict[str, str]:
    """Status and reason from ``mtmc verify``."""
    command = [*isolated_command("mtmc_lsp"), "verify", str(reference), str(candidate), "--json"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    document = json.loads(process.stdout)
    if "verdict" not in document:
        return {"status": "error", "reason": str(document["error"]["message"])}
    return {"status": document["verdict"]["status"], "reason": document["verdict"]["reason"]}


def run_kernelbench(kernelbench: Path, reference: Path, candidate: Path) -> dict[str, Any]:
    """KernelBench's verdict, evaluated in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answer.json"
        command = [sys.executable, __file__, str(kernelbench), str(output), "--judge", str(reference), str(candidate)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        if not output.exists():
            return {"correct": None, "why": process.stderr.strip().splitlines()[-1:]}
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return result


def kernelbench_verdict(kernelbench: Path, reference: Path, candidate: Path) -> dict[str, Any]:
    """Verdict of KernelBench's evaluator."""
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
        evaluator.get_tolerance_for_precision = lambda precision: LOOSE_TOLERANCE
        loose = strict["correct"] or judge(evaluator, *texts)["correct"]
        evaluator.get_tolerance_for_precision = tolerance
        # Disable TF32 in the reference, which cuDNN may otherwise use: a TF32 candidate then has a larger error.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        return {**strict, "loose": loose, "without TF32": judge(evaluator, *texts)["correct"]}


def _on_gpu(evaluator: Any, reference: str, candidate: str) -> dict[str, Any]:
    result = evaluator.eval_kernel_against_ref(
        reference, candidate, seed_num=SEED, num_correct_trials=TRIALS, backend="triton"
    )
    return {"correct": bool(result and result.correctness), "why": str(result.metadata if result else "no result")}


def _on_cpu(evaluator: Any, reference: str, candidate: str) -> dict[str, Any]:
    import torch

    from mtmc_lsp.verify.worker.interpreter import prepare_interpreter
    from mtmc_lsp.verify.worker.interpreter.source import on_cpu

    prepare_interpreter()
    torch.cuda.synchronize = lambda device=None: None
    original, init, inputs = evaluator.load_original_model_and_inputs(reference, {})
    candidate_model, file = evaluator.load_custom_model_with_tempfile(on_cpu(candidate, ""))
    try:
        models = []
        for model_class in (original, candidate_model):
            evaluator.set_seed(SEED)
            models.append(model_class(*init()))
        result = evaluator.run_and_check_correctness(
            *models, inputs, {}, TRIALS, seed=SEED, device=torch.device("cpu"), backend="triton"
        )
    finally:
        os.unlink(file.name)
    return {"correct": bool(result.correctness), "why": str(result.metadata)}


if __name__ == "__main__":
    sys.exit(main())
