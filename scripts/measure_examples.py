"""Optimise every example and record the measurements: one JSON line per example, and a table.

Usage: python scripts/measure_examples.py FOLDER [--budget SECONDS] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mtmc_lsp.app.provenance import current_build, without_absolute_paths
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.process.isolation import isolated_command

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {
    "rmsnorm_residual": "rmsnorm_residual",
    "swiglu_mlp": "SwiGLU",
    "bias_gelu_dropout": "bias_gelu_dropout",
    "label_smoothed_cross_entropy": "label_smoothed_cross_entropy",
    "groupnorm_silu_conv": "ConvBlock",
    "rotary_embedding": "apply_rotary",
    "masked_attention": "masked_attention",
    "temperature_softmax": "temperature_softmax",
    "gemm_epilogue": "Model",
    "two_stage_module": "TwoStage",
}


def optimise(name: str, budget: float) -> dict[str, Any]:
    """Run the command line on one example and return its JSON document."""
    command = [*isolated_command("mtmc_lsp"), "optimize"]
    command += [
        f"{ROOT / 'examples' / name}.py::{EXAMPLES[name]}",
        "--json",
        "--budget",
        str(budget),
        "--python",
        sys.executable,
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    try:
        document: dict[str, Any] = json.loads(process.stdout)
    except json.JSONDecodeError:
        document = {"error": {"message": process.stderr[-2000:]}}
    return document


def summary(name: str, document: dict[str, Any]) -> dict[str, Any]:
    """The document without source texts, which can be reproduced from the examples and the commit."""
    if "error" in document:
        return {"example": name, "error": document["error"]}
    steps = [
        {
            "action": step["action"]["text"],
            "kind": step["action"]["kind"],
            "status": step["status"],
            "reason": step["reason"],
            "timing": step["timing"],
            "errors": {key: step["verdict"][key] for key in ("error", "reference_error")} if step["verdict"] else None,
        }
        for step in document["steps"]
    ]
    final = {key: document["final"][key] for key in ("speedup", "roofline")}
    run_fields = {key: document[key] for key in ("schema", "environment", "baselines", "status", "seconds")}
    return {"example": name, **run_fields, "steps": steps, "final": final}


def line(name: str, document: dict[str, Any], seconds: float) -> str:
    """One row of the table."""
    if "error" in document:
        return f"{name:30} error: {document['error']['message'][:300]}"
    speedup = (document["final"]["speedup"] or {}) if document.get("final") else {}
    ratios = []
    for key in ("vs_eager", "vs_compile", "vs_best"):
        ratio = speedup.get(key)
        ratios.append(f"{ratio['ratio']:5.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "-")
    timed = [s["timing"]["median_us"] for s in document["steps"] if s["status"] == "accepted" and s["timing"]]
    us = f"{timed[-1]:9.1f} us" if timed else "-"
    roofline = document["final"]["roofline"]
    share = f"{roofline:.0%}" if roofline else "-"
    return (
        f"{name:30} {document['status']:10} {us:>12}  "
        + "  ".join(f"{r:22}" for r in ratios)
        + f" {share:>5} {seconds:6.1f} s"
    )


def main() -> None:
    """Optimise the examples, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--budget", type=float, default=60.0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = [
        f"{'example':30} {'status':10} {'time':>12}  {'vs eager':22}  {'vs compile':22}  {'vs best':22} roof   wall"
    ]
    print(rows[0], flush=True)
    with (options.folder / "examples.jsonl").open("w") as stream:
        for name in options.names or EXAMPLES:
            started = time.monotonic()
            document = optimise(name, options.budget)
            rows.append(line(name, document, time.monotonic() - started))
            print(rows[-1], flush=True)
            for step in document.get("steps", []) or []:
                print(f"    {step['status']:9} {step['action']['text'][:60]:60} {step['reason'][:170]}", flush=True)
            result = {**to_json(current_build()), **summary(name, document)}
            stream.write(json.dumps(without_absolute_paths(result, ROOT)) + "\n")
            stream.flush()
    (options.folder / "table.txt").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
