"""Reads ``data/*.toml``, one file per GPU: each number with its origin and a description of how it was obtained."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmc_lsp.core.device_model import DeviceModel, Origin, Provenance, TensorCores

FOLDER = Path(__file__).parent / "data"
RATES = "flops."
"""Prefix of figures that are rates of a precision mode: ``flops.tf32``."""
FACTS = ("name", "arch", "vendor", "tensor_cores", "has_tma")
"""Fields of a model that are not numbers."""
FIGURES = tuple(
    field.name
    for field in dataclasses.fields(DeviceModel)
    if field.name not in (*FACTS, "flops", "is_calibrated", "note", "provenance")
)
"""Fields of a model that are numbers."""


@dataclass(frozen=True)
class DataFile:
    """The data file of one GPU."""

    model: DeviceModel
    gpus: tuple[str, ...]
    """Words that identify the GPU in the driver's name: ``H200``."""
    represents_arch: bool
    """Whether to plan for this GPU if only its architecture is known."""

    def matches(self, gpu: str) -> bool:
        """Whether the driver's name ``gpu`` is a name of this GPU."""
        return any(re.search(rf"\b{re.escape(word)}\b", gpu) for word in self.gpus)


@functools.cache
def data_files() -> tuple[DataFile, ...]:
    """All data files, by name."""
    return tuple(read_data_file(path) for path in sorted(FOLDER.glob("*.toml")))


def read_data_file(path: Path) -> DataFile:
    """Read the data file of one GPU.

    Raises:
        ValueError: a number is missing, unknown, of the wrong type or has no provenance; the message names file and figure.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    figures = table.pop("figures")
    gpus, represents_arch = table.pop("gpus"), table.pop("represents_arch")
    values: dict[str, Any] = {}
    rates: dict[str, float] = {}
    provenance: dict[str, Provenance] = {}
    for name, figure in figures.items():
        value, provenance[name] = _figure(figure, f"{path.name}: {name}")
        if name.startswith(RATES):
            rates[name.removeprefix(RATES)] = float(value)
        elif name in FIGURES:
            values[name] = _as_declared(name, value, path)
        else:
            raise ValueError(f"{path.name}: {name} is not a figure of a device model")
    facts = {**table, "tensor_cores": TensorCores(table["tensor_cores"])}
    missing = [name for name in FIGURES if name not in values] + [name for name in FACTS if name not in facts]
    if missing:
        raise ValueError(f"{path.name}: {', '.join(missing)} missing")
    model = DeviceModel(**facts, **values, flops=rates, provenance=provenance)
    return DataFile(model, tuple(gpus), represents_arch)


def _figure(figure: Any, where: str) -> tuple[Any, Provenance]:
    if not isinstance(figure, dict) or set(figure) != {"value", "origin", "how"}:
        raise ValueError(f"{where}: expected value, origin and how, got {figure!r}")
    if not figure["how"]:
        raise ValueError(f"{where}: how it was obtained is empty")
    return figure["value"], Provenance(Origin(figure["origin"]), figure["how"])


def _as_declared(name: str, value: Any, path: Path) -> int | float:
    kind = typing.get_type_hints(DeviceModel)[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind is int and not isinstance(value, int)):
        raise ValueError(f"{path.name}: {name} is {value!r}, expected {kind.__name__}")
    return typing.cast("int | float", kind(value))
