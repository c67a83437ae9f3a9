"""What is asked of, and found by, the processes that a :class:`~mtmc_lsp.measure.local_measurer.LocalMeasurer` runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mtmc_lsp.compile.messages import LauncherCalls, TensorLayout
from mtmc_lsp.core.graph import Graph, TensorType
from mtmc_lsp.core.results import Check, CheckStatus
from mtmc_lsp.core.run import GeneratedCode
from mtmc_lsp.verify.cases import Case


def checks_of(case: Case, seen: dict[str, Any], compared: dict[str, Any]) -> list[Check]:
    """The checks of one case: of the results, and of what the candidate's process saw."""
    checks = [Check(c["name"], CheckStatus(c["status"]), case.label, c["detail"]) for c in compared["checks"]]
    checks.append(repeats("determinism", case, seen["differing"], compared["differing"]))
    if case.is_kernels_ground:
        launched = CheckStatus.PASSED if seen["launches"] else CheckStatus.SKIPPED
        detail = "" if seen["launches"] else "the guard chose the original code"
        checks.append(Check("kernel launched", launched, case.label, detail))
    return checks


def repeats(name: str, case: Case, differing: list[int], unexplained: list[int]) -> Check:
    """Whether calls on the same inputs give the same.

    Args:
        name: of the check.
        case: what was called with.
        differing: the candidate's results that differ from call to call.
        unexplained: those of them that the user's own code gives alike each time.
    """
    if unexplained:
        return Check(name, CheckStatus.FAILED, case.label, "calls on the same inputs give different results")
    if differing:
        return Check(name, CheckStatus.SKIPPED, case.label, "results of your own code differ from call to call as well")
    return Check(name, CheckStatus.PASSED, case.label)


def launcher_calls(graph: Graph, code: GeneratedCode, sizes: Sequence[Mapping[str, int]]) -> LauncherCalls | None:
    """Calls of the generated launcher, one for each set of sizes; ``None`` if the code has no launcher."""
    launcher = re.search(r"^def (\w+_launch)\(", code.block, re.MULTILINE)
    if launcher is None:
        return None

    def layout(kind: TensorType, values: Mapping[str, int]) -> TensorLayout:
        shape, stride = (tuple(size.value(values) for size in sizes) for sizes in (kind.shape, kind.stride))
        return TensorLayout(shape, stride, kind.dtype)

    return LauncherCalls(launcher[1], tuple(tuple(layout(i.type, values) for i in graph.inputs) for values in sizes))
