"""Reads a folder of transitions that ``mtmc explore`` wrote."""

from __future__ import annotations

from pathlib import Path

from mtmc_lsp.explore.parquet import read_programs, read_transitions, read_versions
from mtmc_lsp.training.tree import MeasuredTree


def read_tree(folder: Path) -> MeasuredTree:
    """All programs of a folder with their measured trees.

    Raises:
        RequestError: there is no such folder, or it contains no transitions of this version.
        EnvironmentNotAble: pyarrow is not installed.
    """
    return MeasuredTree.of(read_programs(folder), read_versions(folder), read_transitions(folder))
