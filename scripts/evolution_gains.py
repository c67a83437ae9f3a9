"""Summarise evolutions: the best version against the final version of the run that each began with.

    mtmc evolve model.py::f --seconds 300 --json > f.json
    python scripts/evolution_gains.py f.json g.json --out FILE

Gains are geometric means over the workloads. The output has no source code.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import geometric_mean
from typing import Any


def gain_of(version: dict[str, Any]) -> float | None:
    """How many times as fast as the user's code, over all workloads; None if the version was not scored."""
    gains = [score["gain"] for score in version["scores"]]
    return geometric_mean(gains) if gains else None


def summary(document: dict[str, Any]) -> dict[str, Any]:
    """One evolution; ``over_start`` is None if the version of the first run could not be scored again."""
    versions = {version["number"]: version for version in document["versions"]}
    run = document["result"]
    first = [v for v in document["versions"] if v["operator"] == "start" and v["number"] > 0]
    scored = [gain for version in first if version["status"] == "kept" and (gain := gain_of(version)) is not None]
    start, best = (scored[-1] if scored else None), gain_of(versions[document["best"]])
    return {
        "target": run["target"]["qualname"],
        "gpu": run["environment"]["gpu"],
        "workloads": [name for name, _ in document["setup"]["workloads"]],
        "start": start,
        "start_failed": "" if scored or not first else first[0]["reason"],
        "best": best,
        "over_start": best / start if start and best else None,
        "versions": len(versions),
        "kept": sum(version["status"] == "kept" for version in versions.values()),
        "seconds": document["spent"]["seconds"],
        "end_reason": document["end_reason"],
    }


def main() -> None:
    """Print a line for each evolution, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--commit", default="", help="the commit of the tool that made the documents")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    evolutions = [summary(json.loads(path.read_text(encoding="utf-8"))) for path in options.documents]
    ratios = [item["over_start"] for item in evolutions if item["over_start"]]
    mean = geometric_mean(ratios) if ratios else None
    for item in evolutions:
        start, ratio = (f"{v:.2f}x" if v else "-" for v in (item["start"], item["over_start"]))
        print(f"{item['target']:32} start {start:>8}  best {item['best']:.2f}x  over the start {ratio}")
    print(f"{len(ratios)} of {len(evolutions)} have a start; geometric mean over it {mean and f'{mean:.2f}x'}")
    document = {"commit": options.commit, "over_start": mean, "evolutions": evolutions}
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
