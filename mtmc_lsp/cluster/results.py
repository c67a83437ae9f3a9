"""Results of ``mtmc bench`` on a cluster: what they depend on, and the file of each kind of GPU."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

from mtmc_lsp.app.bench.runner import Plan
from mtmc_lsp.cluster.machine import Software


def cluster_plan(plan: Plan, software: Software, kind: str) -> Plan:
    """The plan for workers of a kind: its results depend on their software and their GPU instead of this machine's."""
    return replace(plan, environment={**asdict(software), "gpus": kind})


def file_of_kind(out: Path, kind: str) -> Path:
    """The file of results of a kind of GPU, beside ``out``: ``results-nvidia-h200.jsonl``."""
    words = "-".join(re.findall(r"[a-z0-9]+", kind.lower()))
    return out.with_name(f"{out.stem}-{words}{out.suffix}")
