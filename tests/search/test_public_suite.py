"""The targets of the public suite whose packages are installed here: each is in its module, and its directive fits it.

``scripts/public_suite.py check`` captures and plans them, which takes minutes.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from mtmc_lsp.app.bench.manifest import Entry, read_manifests
from mtmc_lsp.app.bench.package_copies import copy_targets, manifest_problems
from mtmc_lsp.capture.client import find_workload
from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.workload import WorkloadSource
from mtmc_lsp.source.targets import find_target

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PACKAGES: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
for _suite in ("public", "public_loops"):
    for _entry in read_manifests(BENCHMARKS / _suite):
        PACKAGES[_suite, _entry.package].append(_entry)


@pytest.mark.parametrize(("suite", "package"), sorted(PACKAGES))
def test_each_target_of_an_installed_package_has_a_workload(suite: str, package: str, tmp_path: Path) -> None:
    entries = PACKAGES[suite, package]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed")
    if version != entries[0].version:
        pytest.skip(f"installed is {version}")
    assert not copy_targets(entries, BENCHMARKS / suite, tmp_path, sys.executable).skipped
    for entry, problem in zip(entries, manifest_problems(entries, tmp_path), strict=True):
        text, path = problem.path.read_bytes(), str(problem.path)
        try:
            workload = find_workload(path, text, find_target(text, path, problem.target))
        except TargetUnsupported:
            # A limit of this tool, which the results of the suite report; a wrong directive is another error.
            continue
        expected = WorkloadSource.GET_INPUTS if entry.code else WorkloadSource.DIRECTIVE
        assert workload.source is expected, entry.name
