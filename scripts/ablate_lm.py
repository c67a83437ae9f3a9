"""Train lm policies that each leave something out, and replay all of them on the measured trees of held-out families.

Usage: python scripts/ablate_lm.py --data DIR --out FOLDER [--new-model 1M] [--seconds 180] [--jobs 8] [--only NAMES]
       python scripts/ablate_lm.py --out FOLDER --summary

Each variant is one `mtmc train policy --kind lm` and one `mtmc train replay`, in FOLDER/NAME. Several train at the same time, on
one GPU too: small models leave it idle most of the time. Start it again to continue trainings that are not complete. Writes
FOLDER/ablations.json and FOLDER/ablations.md. With the defaults it is made for 8 minutes on one GPU with 16 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mtmc_lsp.app.provenance import current_build

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "all": (),
    "without history": ("--without", "history"),
    "without the device": ("--without", "device"),
    "without rewards for compiling and correctness": ("--without", "compile-reward"),
    "without the supervised start": ("--without", "supervised"),
    "half of the programs": ("--share", "0.5"),
    "a tenth of the programs": ("--share", "0.1"),
    "without PPO": ("--updates", "0"),
}
"""Names and options of `mtmc train policy`. An option that is given twice has its last value."""
MARKS = (1, 2, 4, 24)
SEARCHES = ("greedy", "beam")
REFERENCES = ("roofline-greedy", "ranker-greedy", "ranker-beam", "random")
LATE = 600.0
"""Seconds that loading the data, the last update and the replays may take besides the training."""


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="transitions that `mtmc explore` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new-model", default="1M")
    parser.add_argument("--seconds", type=float, default=180.0, help="of each training")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--updates", type=int, default=60, help="by PPO")
    parser.add_argument("--walks", type=int, default=64, help="per update by PPO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=8, help="variants at the same time")
    parser.add_argument("--only", default="", help="names of variants, separated by commas")
    parser.add_argument("--programs", type=int, default=0, help="most programs of a replay; 0 for all")
    parser.add_argument("--summary", action="store_true", help="only summarise what is in FOLDER")
    options = parser.parse_args()
    names = [name.strip() for name in options.only.split(",") if name.strip()] or list(VARIANTS)
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"there is no variant {unknown[0]}; choose from {', '.join(VARIANTS)}")
    if not options.summary:
        if options.data is None:
            parser.error("name --data")
        options.out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            list(pool.map(lambda name: run(name, options), names))
    found = {name: result for name in names if (result := read(options.out / folder_of(name))) is not None}
    if not found:
        print("no variant has a result", file=sys.stderr)
        return 1
    build = current_build()
    facts = {"commit": build.commit, "version": build.version, "variants": found}
    (options.out / "ablations.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    text = markdown(found)
    (options.out / "ablations.md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if len(found) == len(names) else 1


def folder_of(name: str) -> str:
    """The folder of a variant."""
    return name.replace(" ", "-")


def run(name: str, options: argparse.Namespace) -> None:
    """Train and replay one variant; what fails is told and leaves the others alone."""
    folder = options.out / folder_of(name)
    size = ["--new-model", options.new_model, "--epochs", str(options.epochs), "--updates", str(options.updates)]
    limits = ["--walks", str(options.walks), "--seed", str(options.seed), "--seconds", str(options.seconds)]
    data = ["--data", str(options.data)]
    train = ["policy", "--kind", "lm", *data, "--out", str(folder), *size, *limits, *VARIANTS[name], "--json"]
    if not _mtmc(name, train, folder.with_suffix(".training.json"), options.seconds + LATE):
        return
    replay = ["replay", *data, "--lm", str(folder / "policy"), "--out", str(folder / "replays.md"), "--json"]
    replay += ["--programs", str(options.programs)]
    if _mtmc(name, replay, folder / "replays.out", LATE):
        print(f"{name}: done", file=sys.stderr, flush=True)


def _mtmc(name: str, words: Sequence[str], out: Path, seconds: float) -> bool:
    command = [sys.executable, "-m", "mtmc_lsp", "train", *words]
    # More threads than this wait for each other: the processes share the cores.
    environment = {"OMP_NUM_THREADS": "2", **os.environ}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{name}: `{words[0]}` took longer than {seconds:.0f} s", file=sys.stderr, flush=True)
        return False
    if done.returncode:
        print(f"{name}: `{words[0]}` failed: {done.stderr.strip()[-500:]}", file=sys.stderr, flush=True)
        return False
    out.write_text(done.stdout, encoding="utf-8")
    return True


def read(folder: Path) -> dict[str, Any] | None:
    """The results of a variant; None if it has none."""
    try:
        replays = json.loads((folder / "replays.json").read_text(encoding="utf-8"))["replays"]
        training = json.loads(folder.with_suffix(".training.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError):
        return None
    points = [point for point in training["points"] if point["validation_top1"] is not None]
    last: dict[str, Any] = points[-1] if points else {}
    return {
        "updates": training["status"]["update"],
        "all_updates": training["status"]["updates"],
        "weights": training["status"]["parameters"],
        "device": training["status"]["device"],
        "training_seconds": round(sum(point["seconds"] for point in training["points"]), 1),
        "validation_top1": last.get("validation_top1"),
        "validation_reward": last.get("validation_reward"),
        "programs": replays["programs"],
        "families": replays["families"],
        "replays": {key: item for key, item in replays["replays"].items() if key.startswith("lm") or key in REFERENCES},
    }


def markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Each variant with each search, after the planners that are no language models."""
    head = [
        "",
        "updates",
        "best first",
        *(f"after {mark}" for mark in MARKS),
        "of roofline-greedy (95 %)",
        "candidates",
    ]
    rows = [head, ["---"] * len(head)]
    first = next(iter(found.values()))
    rows += [_row(name, "", "", first["replays"][name]) for name in REFERENCES if name in first["replays"]]
    for name, item in found.items():
        top1 = item["validation_top1"]
        share = f"{100 * top1:.0f} %" if top1 is not None else ""
        updates = f"{item['updates']} of {item['all_updates']}"
        rows += [_row(f"lm, {name}, {search}", updates, share, item["replays"][f"lm-{search}"]) for search in SEARCHES]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"Replays on {first['programs']} programs of {first['families']} held-out families.\n\n{table}\n"


def _row(name: str, updates: str, share: str, item: Mapping[str, Any]) -> list[str]:
    low, high = item["relative_range"]
    speedups = [f"{item['by_candidates'][mark]:.3f}x" for mark in MARKS]
    relative = f"{item['relative']:.3f} ({low:.3f} to {high:.3f})"
    return [name, updates, share, *speedups, relative, f"{item['candidates']:.1f}"]


if __name__ == "__main__":
    sys.exit(main())
