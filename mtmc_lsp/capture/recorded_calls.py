"""Calls recorded by ``mtmc record``: merges the records of all processes, stores them, and derives workloads from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtmc_lsp.capture.recorded_files import read_recorded, store_recorded
from mtmc_lsp.core.dtypes import SHORT, is_float, short_dtype
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import (
    ArgumentSpec,
    Container,
    ModuleForm,
    Target,
    TargetKind,
    TensorSpec,
    Workload,
    WorkloadSource,
    leaves_of,
)

RECORDS = "records.jsonl"
"""The file in the project's ``.mtmc`` folder, with one :class:`RecordedTarget` per line."""


@dataclass(frozen=True)
class RecordedCall:
    """Calls of one target with the same signature."""

    count: int
    arguments: tuple[ArgumentSpec, ...]
    init_arguments: tuple[ArgumentSpec, ...] = ()
    """Arguments of the constructor, for modules."""
    in_training: int = 0
    """Number of these calls on a module in training mode."""
    under_autograd: int = 0
    """Number of these calls that recorded gradients."""
    compiled: int = 0
    """Number of these calls that ran code of ``torch.compile``."""
    varying: tuple[str, ...] = ()
    """Names of numeric arguments that differed between calls. ``arguments`` has their first value."""
    module_dtype: str = ""
    """Dtype of the module's floating-point parameters; empty for a function, and if there are several dtypes."""
    unusable: str = ""
    """Why these calls cannot become a workload, as a clause; empty if they can."""
    autocast: str = ""
    """Dtype of the caller's autocast; empty for calls without autocast."""

    @property
    def records_gradients(self) -> bool:
        """Whether all of these calls recorded gradients."""
        return self.under_autograd == self.count

    @property
    def directive(self) -> str:
        """The call as a directive."""
        arguments, init = map(argument_text, self.arguments), map(argument_text, self.init_arguments)
        # Without a word, parameters are as the constructor creates them, which is float32 with few exceptions.
        words = replace(self.module_form, dtype="") if self.module_dtype == "float32" else self.module_form
        module = [f"module={words.words}"] if words.words else []
        trained = [
            leaf.name for leaf in leaves_of(self.arguments) if leaf.tensor is not None and leaf.tensor.requires_grad
        ]
        trained = trained or (["parameters"] if self.under_autograd and self.init_arguments else [])
        gradients = [f"grad={','.join(trained)}"] if trained and self.under_autograd else []
        autocast = [f"autocast={short_dtype(self.autocast)}"] if self.autocast else []
        constructor = ["init:", *init] if self.init_arguments else []
        return " ".join(["# mtmc:", *module, *arguments, *gradients, *autocast, *constructor])

    @property
    def module_form(self) -> ModuleForm:
        """The dtype and mode of the module."""
        is_training = self.in_training == self.count
        return ModuleForm(self.module_dtype, True if self.in_training and is_training else None)


@dataclass(frozen=True)
class RecordedTarget:
    """All recorded calls of one function or method, most frequent signature first."""

    path: str
    qualname: str
    calls: tuple[RecordedCall, ...]
    others: int = 0
    """Calls with further signatures, which were only counted."""
    traced: int = 0
    """How often ``torch.compile`` traced a call of it into the code of a compiled caller. The inputs are not known."""

    @property
    def typical(self) -> RecordedCall | None:
        """The most frequent calls, if possible ones that can become a workload. None if there are no calls."""
        served = (call for call in self.calls if not call.unusable)
        return next(served, self.calls[0] if self.calls else None)

    @property
    def count(self) -> int:
        """Total number of calls."""
        return sum(call.count for call in self.calls) + self.others

    @property
    def is_compiled(self) -> bool:
        """Whether the user's program runs it compiled: inside a compiled caller, or in at least half of the calls."""
        recorded = sum(call.count for call in self.calls)
        return self.traced > 0 or 0 < recorded <= 2 * sum(call.compiled for call in self.calls)


def merge_records(records: Iterable[list[dict[str, Any]]]) -> list[RecordedTarget]:
    """Merge the records of all processes. The target with the most calls comes first."""
    calls: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    others: dict[tuple[str, str], int] = {}
    traced: dict[tuple[str, str], int] = {}
    for function in (item for process in records for item in process):
        key = (function["path"], function["qualname"])
        others[key] = others.get(key, 0) + function["others"]
        traced[key] = traced.get(key, 0) + function["traced"]
        signatures = calls.setdefault(key, {})
        for call in function["calls"]:
            signature = json.dumps(
                [
                    [_signature_part(item) for item in call["arguments"]],
                    call["init"],
                    call.get("module_dtype"),
                    call.get("autocast"),
                ],
                sort_keys=True,
            )
            signatures[signature] = _sum_of(signatures[signature], call) if signature in signatures else call
    targets = []
    for key, signatures in calls.items():
        ordered = sorted(
            (_call(call) for call in signatures.values()), key=lambda call: (bool(call.unusable), -call.count)
        )
        targets.append(RecordedTarget(*key, tuple(ordered), others[key], traced[key]))
    return sorted(targets, key=lambda target: (-target.count, target.path, target.qualname))


def _signature_part(argument: Mapping[str, Any]) -> Any:
    """The part of an argument that is equal in all calls of one signature."""
    if "items" in argument:
        return [argument["name"], argument["container"], [_signature_part(item) for item in argument["items"]]]
    if "tensor" in argument:
        return [argument["name"], [argument["tensor"][name] for name in ("shape", "stride", "dtype")]]
    if type(argument.get("constant")) in (int, float):
        return [argument["name"], type(argument["constant"]).__name__]
    return argument


def _sum_of(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    arguments = [merged_argument(a, b) for a, b in zip(one["arguments"], other["arguments"], strict=True)]
    counts = {name: one[name] + other[name] for name in ("count", "training", "grad", "compiled")}
    return {**one, **counts, "arguments": arguments}


def merged_argument(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The record of an argument of equal calls in two processes."""
    item = dict(a)
    if "items" in a:
        item["items"] = [merged_argument(one, other) for one, other in zip(a["items"], b["items"], strict=True)]
    elif "tensor" in a:
        low = [t["low"] for t in (a["tensor"], b["tensor"]) if "low" in t]
        high = [t["high"] for t in (a["tensor"], b["tensor"]) if "high" in t]
        needs = a["tensor"].get("requires_grad", False) or b["tensor"].get("requires_grad", False)
        item["tensor"] = {
            **a["tensor"],
            **({"low": min(low), "high": max(high)} if low else {}),
            "requires_grad": needs,
        }
    elif "constant" in a:
        item["varies"] = a.get("varies", False) or b.get("varies", False) or a["constant"] != b["constant"]
    return item


def _leaves(arguments: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The arguments, with each container replaced by the leaves in it."""
    for item in arguments:
        if "items" in item:
            yield from _leaves(item["items"])
        else:
            yield item


def _call(data: Mapping[str, Any]) -> RecordedCall:
    return RecordedCall(
        data["count"],
        tuple(argument_spec(item) for item in data["arguments"] if _is_known(item)),
        tuple(argument_spec(item) for item in data["init"] if _is_known(item) and "tensor" not in item),
        data["training"],
        data["grad"],
        data["compiled"],
        tuple(item["name"] for item in _leaves(data["arguments"]) if item.get("varies")),
        data.get("module_dtype", ""),
        _unusable(data),
        data.get("autocast", ""),
    )


def _is_known(argument: Mapping[str, Any]) -> bool:
    return not any("other" in leaf for leaf in _leaves([argument]))


def unusable_argument(argument: Mapping[str, Any]) -> str:
    """Why an argument cannot be created again, as a clause; empty if it can."""
    for item in _leaves([argument]):
        if "other" in item:
            return f"argument {item['name']!r} was a {item['other']}"
        dtype = item["tensor"]["dtype"] if "tensor" in item else "float32"
        if dtype not in SHORT.values():
            return f"argument {item['name']!r} had dtype {dtype}, which is not supported"
    return ""


def _unusable(data: Mapping[str, Any]) -> str:
    for argument in data["arguments"]:
        reason = unusable_argument(argument)
        if reason:
            return reason
    for item in _leaves(data["init"]):
        if "constant" not in item:
            kind = item.get("other", "tensor")
            return f"constructor argument {item['name']!r} was a {kind}"
    return ""


def argument_spec(item: Mapping[str, Any]) -> ArgumentSpec:
    """The recorded argument as part of a workload; it must not contain values of unknown kinds."""
    if "items" in item:
        container = from_json(Container, item["container"])
        return ArgumentSpec(item["name"], container=container, items=tuple(map(argument_spec, item["items"])))
    if "tensor" not in item:
        return ArgumentSpec(item["name"], None, item["constant"])
    tensor = item["tensor"]
    shape, stride = tuple(tensor["shape"]), tuple(tensor["stride"])
    low, high = tensor.get("low"), tensor.get("high")
    # Most float inputs are generated from a normal distribution. A range without negative numbers is preserved because
    # the code may need it, for example for a logarithm.
    keeps = tensor.get("keeps_range", False)
    if low is not None and is_float(tensor["dtype"]) and (low < 0 or low == high) and not keeps:
        low = high = None
    return ArgumentSpec(
        item["name"],
        TensorSpec(
            tuple(Size.of(size) for size in shape),
            tensor["dtype"],
            None if stride == _dense(shape) or math.prod(shape) == 0 else tuple(Size.of(step) for step in stride),
            low,
            high,
            requires_grad=bool(tensor.get("requires_grad")) and is_float(tensor["dtype"]),
        ),
    )


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def argument_text(item: ArgumentSpec) -> str:
    """The argument as in a directive: ``x=f32[64,128]``."""
    return f"{item.name}={_directive_value(item)}"


def _directive_value(item: ArgumentSpec) -> str:
    if item.container is not None:
        return item.container.expression([_directive_value(part) for part in item.items]).replace(", ", ",")
    if item.tensor is None:
        return repr(item.constant).replace(" ", "") if not isinstance(item.constant, str) else repr(item.constant)
    spec = item.tensor
    text = f"{short_dtype(spec.dtype)}[{','.join(map(str, spec.shape))}]"
    if spec.stride is not None:
        text += f"{{{','.join(map(str, spec.stride))}}}"
    if spec.low is not None and spec.high is not None:
        text += f"@{spec.low:g}..{spec.high:g}"
    return text


# The file ------------------------------------------------------------------------------------------------------------


def read_records(file: Path) -> list[RecordedTarget]:
    """Read the stored records; empty if nothing was recorded.

    Raises:
        RequestError: the file has invalid content.
        UnsafeFile: the file is a link, a pipe or a device.
    """
    return read_recorded(file, RecordedTarget, "calls")


def store_records(file: Path, targets: Iterable[RecordedTarget]) -> None:
    """Store new records, which atomically replace older records of the same targets."""
    store_recorded(file, [*read_records(file), *targets])


def find_record(target: Target, file: Path) -> RecordedTarget | None:
    """The record of a target; for a module, the record of its ``forward``."""
    name = f"{target.qualname}.forward" if target.kind is TargetKind.MODULE else target.qualname
    return next((item for item in read_records(file) if (item.path, item.qualname) == (target.path, name)), None)


def recorded_form(record: RecordedTarget) -> ModuleForm:
    """The dtype and mode of the module in the typical recorded calls."""
    return record.typical.module_form if record.typical is not None else ModuleForm()


def workload_from_record(target: Target, record: RecordedTarget) -> Workload | None:
    """The workload of the typical recorded calls; ``None`` if they cannot be repeated."""
    call = record.typical
    if call is None or call.unusable:
        return None
    workload = recorded_workload(target, call, training=False)
    return replace(workload, module=ModuleForm(), assumed=tuple(_assumed(record, call)))


def recorded_workload(target: Target, call: RecordedCall, *, training: bool) -> Workload:
    """The workload of one recorded call, with its module in the mode of the call."""
    return Workload(
        target,
        WorkloadSource.RECORDED,
        call.arguments,
        call.init_arguments if target.class_name else (),
        module=ModuleForm(call.module_dtype, training if target.class_name else None),
        trains=call.under_autograd > 0,
        autocast=call.autocast,
    )


def _assumed(record: RecordedTarget, call: RecordedCall) -> Iterable[str]:
    yield f"the inputs have the shapes and dtypes of {call.count} of the {record.count} recorded calls"
    for name in call.varying:
        value = next(item.constant for item in leaves_of(call.arguments) if item.name == name)
        yield f"{name} varied between calls; the workload uses {value!r}"
    if call.in_training and not call.module_form.training:
        yield "the module was recorded in training mode; it is optimised in evaluation mode"
