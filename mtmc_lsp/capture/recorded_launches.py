"""Launches of kernels recorded by ``mtmc record``: merges the records of all processes, stores them, derives workloads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtmc_lsp.capture.recorded_calls import argument_spec, merged_argument, unusable_argument
from mtmc_lsp.capture.recorded_files import read_recorded, store_recorded
from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.workload import ArgumentSpec, RecordedGrid, Target, Workload, WorkloadSource

LAUNCHES = "launches.jsonl"
"""The file in the project's ``.mtmc`` folder, with one :class:`RecordedKernel` per line."""

LARGEST_VALUE = 1e30
"""Larger floats are not values of the program: results that the kernel is going to write have no defined values yet."""


@dataclass(frozen=True)
class RecordedLaunch:
    """Equal launches of one kernel."""

    count: int
    arguments: tuple[ArgumentSpec, ...]
    grid: RecordedGrid
    unusable: str = ""
    """Why these launches cannot be repeated, as a clause; empty if they can."""


@dataclass(frozen=True)
class RecordedKernel:
    """All recorded launches of one kernel: those that can be repeated first, then the most frequent ones."""

    path: str
    qualname: str
    launches: tuple[RecordedLaunch, ...]
    others: int = 0
    """Further launches, which were only counted."""

    @property
    def count(self) -> int:
        """Total number of launches."""
        return sum(launch.count for launch in self.launches) + self.others

    @property
    def usable(self) -> tuple[RecordedLaunch, ...]:
        """The launches that can be repeated."""
        return tuple(launch for launch in self.launches if not launch.unusable)


def merge_launches(records: Iterable[list[dict[str, Any]]]) -> list[RecordedKernel]:
    """Merge the records of all processes. The kernel with the most launches comes first."""
    merged: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    others: dict[tuple[str, str], int] = {}
    for kernel in (item for process in records for item in process):
        key = (kernel["path"], kernel["qualname"])
        others[key] = others.get(key, 0) + kernel["others"]
        launches = merged.setdefault(key, {})
        for launch in kernel["launches"]:
            identity = _identity(launch)
            launches[identity] = _sum_of(launches[identity], launch) if identity in launches else launch
    kernels = []
    for key, launches in merged.items():
        ordered = sorted(map(_launch, launches.values()), key=lambda item: (bool(item.unusable), -item.count))
        kernels.append(RecordedKernel(*key, tuple(ordered), others[key]))
    return sorted(kernels, key=lambda kernel: (-kernel.count, kernel.path, kernel.qualname))


def _identity(launch: Mapping[str, Any]) -> str:
    """A text that is the same for equal launches."""
    parts = [_identity_of_argument(item) for item in launch["arguments"]]
    return json.dumps([parts, launch["grid"], launch["options"]], sort_keys=True)


def _identity_of_argument(item: Mapping[str, Any]) -> Any:
    if "tensor" in item:
        return [item["name"], [item["tensor"][name] for name in ("shape", "stride", "dtype")]]
    if "items" in item:
        return [item["name"], item["container"], [_identity_of_argument(part) for part in item["items"]]]
    constant = item.get("constant")
    return [item["name"], "float" if isinstance(constant, float) else repr(constant), item.get("other")]


def _sum_of(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    arguments = [merged_argument(a, b) for a, b in zip(one["arguments"], other["arguments"], strict=True)]
    return {**one, "count": one["count"] + other["count"], "arguments": arguments}


def _launch(data: Mapping[str, Any]) -> RecordedLaunch:
    reasons = [reason for item in data["arguments"] if (reason := unusable_argument(item))]
    grid = RecordedGrid(tuple(data["grid"]), data["options"], data["is_tuned"], data["shared"])
    arguments = () if reasons else tuple(argument_spec(_described(item)) for item in data["arguments"])
    return RecordedLaunch(data["count"], arguments, grid, reasons[0] if reasons else "")


def _described(item: dict[str, Any]) -> dict[str, Any]:
    """The record of an argument without a gradient, which no launch records, and without the range of uninitialised memory."""
    if "tensor" not in item:
        return item
    tensor = {**item["tensor"], "requires_grad": False}
    if max(abs(tensor.get("low", 0.0)), abs(tensor.get("high", 0.0))) > LARGEST_VALUE and is_float(tensor["dtype"]):
        tensor = {name: value for name, value in tensor.items() if name not in ("low", "high")}
    return {**item, "tensor": tensor}


def read_launches(file: Path) -> list[RecordedKernel]:
    """Read the stored launches; empty if nothing was recorded.

    Raises:
        RequestError: the file has invalid content.
        UnsafeFile: the file is a link, a pipe or a device.
    """
    return read_recorded(file, RecordedKernel, "launches")


def store_launches(file: Path, kernels: Iterable[RecordedKernel]) -> None:
    """Store new launches, which atomically replace older ones of the same kernels."""
    store_recorded(file, [*read_launches(file), *kernels])


def find_launches(target: Target, file: Path) -> RecordedKernel | None:
    """The recorded launches of a kernel."""
    name = (target.path, target.qualname)
    return next((item for item in read_launches(file) if (item.path, item.qualname) == name), None)


def launch_workloads(target: Target, kernel: RecordedKernel) -> list[Workload]:
    """A workload for each launch that can be repeated, the most frequent one first."""
    workloads = []
    for launch in kernel.usable:
        assumed = f"the arguments and the grid are those of {launch.count} of the {kernel.count} recorded launches"
        workload = Workload(target, WorkloadSource.LAUNCH, launch.arguments, launch=launch.grid)
        workloads.append(replace(workload, assumed=(assumed,)))
    return workloads
