"""Calls noted by ``mtmc record``: put together from the processes that saw them, kept in the project, made workloads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmc_lsp.core.dtypes import SHORT, is_float
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import ArgumentSpec, Target, TargetKind, TensorSpec, Workload, WorkloadSource
from mtmc_lsp.process.project_files import read_bytes, replace_bytes

RECORDS = "records.jsonl"
"""The file in the project's ``.mtmc``; one :class:`RecordedTarget` a line."""


@dataclass(frozen=True)
class RecordedCall:
    """Calls of one target that look alike."""

    count: int
    arguments: tuple[ArgumentSpec, ...]
    init_arguments: tuple[ArgumentSpec, ...] = ()
    """For modules: what the constructor was called with."""
    in_training: int = 0
    """How many of them were on a module in training mode."""
    under_autograd: int = 0
    """How many of them recorded gradients."""
    varying: tuple[str, ...] = ()
    """Numbers that differed from call to call; the first is kept."""
    unusable: str = ""
    """Why no workload can be made of it; empty where one can."""

    @property
    def directive(self) -> str:
        """The same as a directive."""
        words = [f"{item.name}={_word(item)}" for item in self.arguments]
        init = [f"{item.name}={_word(item)}" for item in self.init_arguments]
        return " ".join(["# mtmc:", *words, *(["init:", *init] if init else [])])


@dataclass(frozen=True)
class RecordedTarget:
    """All recorded calls of one function or method, the most frequent first."""

    path: str
    qualname: str
    calls: tuple[RecordedCall, ...]
    others: int = 0
    """Calls of yet other kinds, which were only counted."""

    @property
    def count(self) -> int:
        """How often it was called."""
        return sum(call.count for call in self.calls) + self.others


def merged(notes: Iterable[list[dict[str, Any]]]) -> list[RecordedTarget]:
    """The notes of all processes as one, the most called target first."""
    calls: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    others: dict[tuple[str, str], int] = {}
    for function in (item for process in notes for item in process):
        place = (function["path"], function["qualname"])
        others[place] = others.get(place, 0) + function["others"]
        known = calls.setdefault(place, {})
        for call in function["calls"]:
            key = json.dumps([[_kind(item) for item in call["arguments"]], call["init"]], sort_keys=True)
            known[key] = _added(known[key], call) if key in known else call
    found = []
    for place, known in calls.items():
        ordered = sorted((_call(call) for call in known.values()), key=lambda call: (bool(call.unusable), -call.count))
        found.append(RecordedTarget(*place, tuple(ordered), others[place]))
    return sorted(found, key=lambda target: (-target.count, target.path, target.qualname))


def _kind(argument: Mapping[str, Any]) -> Any:
    """What two calls of one signature have in common."""
    if "tensor" in argument:
        return [argument["name"], [argument["tensor"][name] for name in ("shape", "stride", "dtype")]]
    if type(argument.get("constant")) in (int, float):
        return [argument["name"], type(argument["constant"]).__name__]
    return argument


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    arguments = []
    for a, b in zip(one["arguments"], other["arguments"], strict=True):
        item = dict(a)
        if "tensor" in a:
            low = [t["low"] for t in (a["tensor"], b["tensor"]) if "low" in t]
            high = [t["high"] for t in (a["tensor"], b["tensor"]) if "high" in t]
            item["tensor"] = {**a["tensor"], **({"low": min(low), "high": max(high)} if low else {})}
        elif "constant" in a:
            item["varies"] = a.get("varies", False) or b.get("varies", False) or a["constant"] != b["constant"]
        arguments.append(item)
    counts = {name: one[name] + other[name] for name in ("count", "training", "grad")}
    return {**one, **counts, "arguments": arguments}


def _call(data: Mapping[str, Any]) -> RecordedCall:
    init = tuple(_spec(item) for item in data["init"] if "tensor" not in item and "other" not in item)
    return RecordedCall(
        data["count"],
        tuple(_spec(item) for item in data["arguments"] if "other" not in item),
        init,
        data["training"],
        data["grad"],
        tuple(item["name"] for item in data["arguments"] if item.get("varies")),
        _unusable(data),
    )


def _unusable(data: Mapping[str, Any]) -> str:
    for item in data["arguments"]:
        if "other" in item:
            return f"its argument {item['name']!r} was a {item['other']}"
        dtype = item["tensor"]["dtype"] if "tensor" in item else "float32"
        if dtype not in SHORT.values():
            return f"its argument {item['name']!r} was {dtype}, which is not supported"
    for item in data["init"]:
        if "constant" not in item:
            kind = item.get("other", "tensor")
            return f"the argument {item['name']!r} of its constructor was a {kind}"
    return ""


def _spec(item: Mapping[str, Any]) -> ArgumentSpec:
    if "tensor" not in item:
        return ArgumentSpec(item["name"], None, item["constant"])
    tensor = item["tensor"]
    shape, stride = tuple(tensor["shape"]), tuple(tensor["stride"])
    low, high = tensor.get("low"), tensor.get("high")
    # Normal numbers stand for most floats. Those that are never negative may be wanted so, as by a logarithm.
    if low is not None and is_float(tensor["dtype"]) and (low < 0 or low == high):
        low = high = None
    return ArgumentSpec(
        item["name"],
        TensorSpec(
            tuple(Size.of(size) for size in shape),
            tensor["dtype"],
            None if stride == _dense(shape) or math.prod(shape) == 0 else tuple(Size.of(step) for step in stride),
            low,
            high,
        ),
    )


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _word(item: ArgumentSpec) -> str:
    if item.tensor is None:
        return repr(item.constant).replace(" ", "") if not isinstance(item.constant, str) else repr(item.constant)
    spec = item.tensor
    short = next((short for short, full in SHORT.items() if full == spec.dtype), spec.dtype)
    text = f"{short}[{','.join(map(str, spec.shape))}]"
    if spec.stride is not None:
        text += f"{{{','.join(map(str, spec.stride))}}}"
    if spec.low is not None and spec.high is not None:
        text += f"@{spec.low:g}..{spec.high:g}"
    return text


# The file ------------------------------------------------------------------------------------------------------------


def read_records(file: Path) -> list[RecordedTarget]:
    """What the project keeps; nothing where nothing was recorded.

    Raises:
        RequestError: the file is not as we write it.
        UnsafeFile: it is a link, a pipe or a device.
    """
    found = []
    for number, line in enumerate((read_bytes(file) or b"").splitlines(), 1):
        try:
            found.append(from_json(RecordedTarget, json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"the recorded calls cannot be read: {error}",
                where=Location(str(file), number),
                remedy="Delete the file, and record again.",
            ) from None
    return found


def keep_records(file: Path, found: Iterable[RecordedTarget]) -> None:
    """Put new records in the place of older ones of the same targets, in one step."""
    new = {(target.path, target.qualname): target for target in found}
    kept = {(target.path, target.qualname): target for target in read_records(file)}
    text = "".join(json.dumps(to_json(target)) + "\n" for target in {**kept, **new}.values())
    replace_bytes(file, text.encode())


def recorded(target: Target, file: Path) -> RecordedTarget | None:
    """The records of a target; those of a module are its ``forward``'s."""
    name = f"{target.qualname}.forward" if target.kind is TargetKind.MODULE else target.qualname
    return next((item for item in read_records(file) if (item.path, item.qualname) == (target.path, name)), None)


def recorded_workload(target: Target, found: RecordedTarget) -> Workload | None:
    """The workload of the most frequent recorded calls; None where no call can be made again."""
    call = found.calls[0] if found.calls else None
    if call is None or call.unusable:
        return None
    return Workload(
        target,
        WorkloadSource.RECORDED,
        call.arguments,
        call.init_arguments if target.class_name else (),
        assumed=tuple(_assumed(found, call)),
    )


def _assumed(found: RecordedTarget, call: RecordedCall) -> Iterable[str]:
    yield f"the inputs are like {call.count} of the {found.count} recorded calls"
    for name in call.varying:
        value = next(item.constant for item in call.arguments if item.name == name)
        yield f"{name} varied from call to call; it is taken as {value!r}"
    if call.in_training:
        yield "the module was recorded in training mode; it is optimised in evaluation mode"
    if call.under_autograd:
        yield (
            f"{call.under_autograd} of these calls recorded gradients; the Triton version is forward only, "
            "and such calls keep running the original code"
        )
