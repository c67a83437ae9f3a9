"""Train ``examples/train_gpt.py`` in eager mode, under ``torch.compile`` and with kernels, and write a table of the three.

    python scripts/compare_gpt.py --out FILE [--steps 300] [--seeds 0 1 2] [--budget SECONDS] [--jobs N] [--tiny]
    python scripts/compare_gpt.py --summary FILE

The marked parts of a copy of the example are optimised by ``mtmc bench`` and written into it by ``mtmc apply``. Each variant
trains all its seeds in one separate process. FILE gets one JSON line per variant and seed, with the losses of all steps.
Where the kernels of a block take its calls, those of the parts inside it are not called.
Without a GPU, kernels run in Triton's interpreter: use ``--tiny`` and few steps. Exit code: 1 if no part got kernels, if a
kernel never ran, or if the loss curves differ by more than those of the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_gpt.py"
VARIANTS = ("eager", "compile", "ours")
WINDOWS = 6
"""Loss curves are compared by the means of as many parts of the steps."""


def main() -> int:
    """Compare, or show what was compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file of JSON lines")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for the optimisation of each part")
    parser.add_argument("--jobs", type=int, default=5, help="parts that are optimised at a time")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--filter", default="", help="only the parts with this text in their names")
    parser.add_argument("--tiny", action="store_true", help="a model for CPUs")
    parser.add_argument("--summary", type=Path, help="only print the table of this output")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        train(options)
        return 0
    if options.summary is not None:
        text, is_good = summary([json.loads(line) for line in options.summary.read_text().splitlines()])
        print(text)
        return 0 if is_good else 1
    if options.out is None:
        parser.error("--out or --summary is needed")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, options.out.open("w", encoding="utf-8") as out:
        for variant in options.variants:
            file, seconds, parts = EXAMPLE, 0.0, dict[str, str]()
            if variant == "ours":
                began = time.monotonic()
                file, parts = optimised(Path(folder), options)
                seconds = time.monotonic() - began
            for row in trained(file, variant, options):
                row |= {"variant": variant, "optimise seconds": round(seconds, 1), "parts": parts}
                out.write(json.dumps(row) + "\n")
                out.flush()
                rows.append(row)
    text, is_good = summary(rows)
    print(text)
    return 0 if is_good else 1


def optimised(folder: Path, options: argparse.Namespace) -> tuple[Path, dict[str, str]]:
    """A copy of the example with the kernels of all parts, and what came of each part."""
    file, results = folder / EXAMPLE.name, folder / "parts.jsonl"
    # Otherwise a folder above could count as the project.
    (folder / "pyproject.toml").touch()
    text = EXAMPLE.read_text()
    file.write_text(text)
    bench = ["bench", file.name, "--out", results.name, "--jobs", str(options.jobs), "--budget", str(options.budget)]
    bench += ["--time-limit", str(options.budget + 20), *(["--filter", options.filter] if options.filter else [])]
    # Its exit code is that of the problems.
    _mtmc(folder, *bench)
    parts = {}
    for line in results.read_text().splitlines():
        result = json.loads(line)
        name, status = result["problem"].rpartition("::")[2], result["status"]
        parts[name] = outcome(result)
        if status in ("improved", "unmeasured"):
            parts[name] += "" if _mtmc(folder, "apply", result["id"]) == 0 else ", could not be applied"
        print(name, parts[name], flush=True)
    if not _has_gpu():
        from mtmc_lsp.verify.worker.interpreter.source import on_cpu

        file.write_text(on_cpu(file.read_text(), text))
    return file, parts


def outcome(result: Mapping[str, Any]) -> str:
    """The status of a part, with its speedup over eager mode if it was timed."""
    speedup = ((result.get("final") or {}).get("speedup") or {}).get("vs_eager")
    return str(result["status"]) + (f" {speedup['ratio']:.2f}x" if speedup else "")


def _mtmc(folder: Path, *arguments: str) -> int:
    """The exit code of a command."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "mtmc_lsp", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=False, stdout=sys.stderr).returncode


def trained(file: Path, variant: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of all seeds of a variant, which one process trains.

    Raises:
        subprocess.CalledProcessError: the training failed.
    """
    command = [sys.executable, __file__, "--child", str(file), "--steps", str(options.steps)]
    command += ["--batch", str(options.batch), "--length", str(options.length)]
    command += ["--seeds", *map(str, options.seeds), *(["--tiny"] if options.tiny else [])]
    command += ["--compiled"] if variant == "compile" else []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if variant == "ours" and not _has_gpu():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def train(options: argparse.Namespace) -> None:
    """Train each seed with the file, and print one JSON line for it. The process has no other task."""
    import torch
    import triton

    from mtmc_lsp.app.provenance import current_build
    from mtmc_lsp.guard.conditions import SUFFIX
    from mtmc_lsp.process.module_files import load_file

    if os.environ.get("TRITON_INTERPRET") == "1":
        from mtmc_lsp.verify.worker.interpreter import prepare_interpreter

        prepare_interpreter()
    module = load_file(options.child, "train_gpt")
    calls: dict[str, list[int]] = {}
    for name, guard in list(vars(module).items()):
        if name.endswith(SUFFIX):
            calls[name.removesuffix(SUFFIX)] = counts = [0, 0]
            setattr(module, name, partial(counted, guard, counts))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = {"commit": current_build().commit, "gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    sizes = module.TINY if options.tiny else module.SIZES
    for seed in options.seeds:
        result = module.train(seed, options.steps, options.batch, options.length, sizes, options.compiled)
        result["losses"] = [round(loss, 5) for loss in result["losses"]]
        print(json.dumps({**result, **facts, "calls": {name: tuple(each) for name, each in calls.items()}}), flush=True)


def counted(guard: Callable[..., bool], counts: list[int], *arguments: Any) -> bool:
    """A guard that counts the calls that kernels take, and all calls."""
    takes = guard(*arguments)
    counts[0] += bool(takes)
    counts[1] += 1
    return takes


def windows(losses: Sequence[float]) -> list[float]:
    """The means of equal parts of a loss curve."""
    count = min(WINDOWS, len(losses))
    bounds = [len(losses) * index // count for index in range(count + 1)]
    return [statistics.mean(losses[start:end]) for start, end in itertools.pairwise(bounds)]


def distances(rows: Sequence[Mapping[str, Any]], variant: str) -> tuple[float, float]:
    """How far the mean loss curve of a variant is from that of eager mode, and the spread of the seeds in eager mode.

    Both are means over the windows of the curves; the spread is the highest minus the lowest seed.
    """
    curves = {name: [windows(row["losses"]) for row in rows if row["variant"] == name] for name in ("eager", variant)}
    means = {name: [statistics.mean(each) for each in zip(*items, strict=True)] for name, items in curves.items()}
    apart = statistics.mean(abs(a - b) for a, b in zip(means["eager"], means[variant], strict=True))
    return apart, statistics.mean(max(each) - min(each) for each in zip(*curves["eager"], strict=True))


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """A Markdown table, facts below it, and whether kernels ran and learned as eager mode does."""
    lines = [
        "| variant | loss, first and last part | distance from eager | tokens per second | over eager | peak MiB |"
    ]
    lines.append("|---|---|---|---|---|---|")
    names = [name for name in VARIANTS if any(row["variant"] == name for row in rows)]
    base, spread, is_good = 0.0, None, True
    for name in names:
        chosen = [row for row in rows if row["variant"] == name]
        curves = [windows(row["losses"]) for row in chosen]
        rate = statistics.median(row["tokens per second"] for row in chosen)
        peaks = [row["peak MiB"] for row in chosen if row["peak MiB"] is not None]
        base = rate if name == "eager" else base
        apart = ""
        if names[0] == "eager" and name != "eager":
            distance, spread = distances(rows, name)
            apart = f"{distance:.4f}"
            # One seed has no spread.
            is_good = is_good and (distance <= spread or len(chosen) == 1)
        first, last = (statistics.mean(curve[index] for curve in curves) for index in (0, -1))
        # Without a GPU, rates are those of an interpreter.
        speed = f"{rate:.0f} | {rate / base:.2f}x" if base and peaks else " | "
        peak = f"{max(peaks):.0f}" if peaks else ""
        lines.append(f"| {name} | {first:.3f}, {last:.3f} | {apart} | {speed} | {peak} |")
    lines.append("")
    if spread is not None:
        lines.append(f"Spread of the seeds in eager mode: {spread:.4f}.")
    ours = [row for row in rows if row["variant"] == "ours"]
    if ours:
        parts, calls = ours[-1]["parts"], ours[-1]["calls"]
        is_good = is_good and any(taken for taken, _ in calls.values())
        # Nothing calls a part of a block that has kernels itself.
        is_good = is_good and all(taken for taken, count in calls.values() if count)
        lines.append(f"Optimised in {ours[-1]['optimise seconds']:.0f} s: {_listed(parts)}.")
        texts = {name: f"{taken} of {count}" for name, (taken, count) in calls.items()}
        lines.append(f"Calls that kernels took: {_listed(texts) or 'none'}.")
    facts = sorted({json.dumps({key: row[key] for key in ("commit", "gpu", "torch", "triton")}) for row in rows})
    return "\n".join([*lines, *facts]), is_good


def _listed(items: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in items.items())


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


if __name__ == "__main__":
    sys.exit(main())
