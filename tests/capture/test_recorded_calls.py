"""Records of many processes are merged, stored and turned into workloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.capture.recorded_calls import (
    RECORDS,
    find_record,
    merge_records,
    read_records,
    store_records,
    workload_from_record,
)
from mtmc_lsp.capture.recorder.recorder import functions_of
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.workload import Target, TargetKind, WorkloadSource
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive


def tensor(name: str, shape: list[int], stride: list[int], dtype: str = "float32", **span: float) -> dict[str, Any]:
    return {"name": name, "tensor": {"shape": shape, "stride": stride, "dtype": dtype, **span}}


def process_record(
    count: int, *arguments: dict[str, Any], init: tuple[dict[str, Any], ...] = (), qualname: str = "f"
) -> list[Any]:
    call = {"count": count, "training": 0, "grad": 0, "compiled": 0, "arguments": list(arguments), "init": list(init)}
    return [{"path": "/p/m.py", "qualname": qualname, "others": 0, "traced": 0, "calls": [call]}]


def target(kind: TargetKind = TargetKind.FUNCTION, name: str = "f") -> Target:
    return Target("/p/m.py", name, kind, 1, 2)


def test_equal_signatures_of_several_processes_are_merged_with_the_union_of_their_ranges() -> None:
    index = [tensor("i", [4], [1], "int64", low=2, high=5), tensor("i", [4], [1], "int64", low=0, high=3)]
    (record,) = merge_records([process_record(3, index[0]), process_record(2, index[1])])
    (call,) = record.calls
    assert (call.count, call.arguments[0].tensor.low, call.arguments[0].tensor.high) == (5, 0, 5)


def test_shape_strides_and_dtype_distinguish_signatures_and_the_most_frequent_comes_first() -> None:
    kinds = [
        tensor("x", [2, 3], [3, 1]),
        tensor("x", [2, 3], [1, 2]),
        tensor("x", [2, 3], [3, 1], "float16"),
        tensor("x", [2, 4], [4, 1]),
    ]
    (record,) = merge_records([process_record(i + 1, kind) for i, kind in enumerate(kinds)])
    assert [call.count for call in record.calls] == [4, 3, 2, 1]
    assert record.count == 10


def test_flags_distinguish_signatures_and_numbers_do_not() -> None:
    x = tensor("x", [2], [1])
    steps = [process_record(1, x, {"name": "step", "constant": i}) for i in range(3)]
    (record,) = merge_records(steps)
    assert (len(record.calls), record.calls[0].varying) == (1, ("step",))
    workload = workload_from_record(target(), record)
    assert workload is not None and workload.source is WorkloadSource.RECORDED
    assert "step varied between calls; the workload uses 0" in workload.assumed
    flags = [process_record(1, x, {"name": "flag", "constant": value}) for value in (True, False)]
    assert len(merge_records(flags)[0].calls) == 2


def test_calls_that_cannot_be_repeated_come_last_and_have_no_workload() -> None:
    x = tensor("x", [2], [1])
    (record,) = merge_records(
        [
            process_record(9, x, {"name": "config", "other": "Config"}),
            process_record(1, x, {"name": "config", "constant": None}),
        ]
    )
    assert [call.count for call in record.calls] == [1, 9]
    assert "argument 'config' was a Config" in record.calls[1].unusable
    (only,) = merge_records([process_record(9, x, init=({"name": "layer", "other": "Linear"},))])
    assert workload_from_record(target(), only) is None
    (narrow,) = merge_records([process_record(1, tensor("x", [2], [1], "complex64"))])
    assert "complex64, which is not supported" in narrow.calls[0].unusable


def test_the_workload_is_taken_from_the_most_frequent_calls_with_their_gradients() -> None:
    records = [process_record(count, tensor("x", [size], [1])) for size, count in ((2, 9), (3, 4), (4, 5))]
    for record, grad in zip(records, (9, 0, 5), strict=True):
        record[0]["calls"][0]["grad"] = grad
    (merged,) = merge_records(records)
    assert [call.count for call in merged.calls] == [9, 5, 4]
    workload = workload_from_record(target(), merged)
    assert workload is not None and str(workload.tensors["x"].shape[0]) == "2"
    assert workload.trains
    (only,) = merge_records(records[1:2])
    workload = workload_from_record(target(), only)
    assert workload is not None and not workload.trains


def test_the_workload_of_a_record_equals_the_workload_of_its_directive() -> None:
    arguments = [
        tensor("x", [2, 3], [1, 2], "bfloat16", low=-3.0, high=2.0),
        tensor("p", [2, 3], [3, 1], low=0.25, high=1.0),
        tensor("i", [4], [1], "int64", low=0, high=9),
        tensor("m", [4], [1], "bool"),
        {"name": "eps", "constant": 1e-6},
        {"name": "dims", "constant": [0, 1]},
        {"name": "mode", "constant": "no ne"},
        {"name": "flag", "constant": True},
        {"name": "rest", "constant": None},
    ]
    (record,) = merge_records([process_record(1, *arguments)])
    directive = record.calls[0].directive
    text = f"{directive}\ndef f(x, p, i, m, eps, dims, mode, flag, rest):\n    pass\n".encode()
    found_target = find_target(text, "/p/m.py", "f")
    from_directive, from_record = (
        parse_directive(text, found_target, "/p/m.py"),
        workload_from_record(found_target, record),
    )
    assert from_directive is not None and from_record is not None
    assert from_directive.arguments == from_record.arguments


@pytest.mark.parametrize(
    ("dtype", "training", "grad", "words"),
    [
        ("bfloat16", 0, 0, "module=bf16 "),
        ("float32", 0, 0, ""),
        ("float16", 2, 0, "module=f16,train "),
        ("float16", 2, 2, "module=f16,train "),
        ("float16", 1, 0, "module=f16 "),
        ("", 2, 0, "module=train "),
    ],
)
def test_a_record_keeps_the_dtype_and_mode_of_the_module(dtype: str, training: int, grad: int, words: str) -> None:
    record = process_record(2, tensor("x", [2], [1]), qualname="M.forward")
    record[0]["calls"][0] |= {"training": training, "grad": grad, "module_dtype": dtype}
    (merged,) = merge_records([record])
    assert merged.calls[0].directive == f"# mtmc: {words}x=f32[2]"
    mode_note = "the module was recorded in training mode; it is optimised in evaluation mode"
    workload = workload_from_record(target(TargetKind.MODULE, "M"), merged)
    assert workload is not None
    assert (mode_note in workload.assumed) == (training > 0 and "train" not in words)


def test_calls_under_autocast_have_a_workload_of_their_own() -> None:
    records = [process_record(count, tensor("x", [2], [1])) for count in (3, 2)]
    records[0][0]["calls"][0]["autocast"] = "bfloat16"
    (merged,) = merge_records(records)
    assert [call.directive for call in merged.calls] == ["# mtmc: x=f32[2] autocast=bf16", "# mtmc: x=f32[2]"]
    workload = workload_from_record(target(), merged)
    assert workload is not None and workload.autocast == "bfloat16"


def test_calls_of_modules_in_two_dtypes_are_two_signatures() -> None:
    records = [process_record(1, tensor("x", [2], [1]), qualname="M.forward") for _ in range(2)]
    for record, dtype in zip(records, ("float32", "bfloat16"), strict=True):
        record[0]["calls"][0]["module_dtype"] = dtype
    assert len(merge_records(records)[0].calls) == 2


def test_new_records_replace_only_records_of_the_same_target(tmp_path: Path) -> None:
    file = tmp_path / RECORDS
    old = merge_records(
        [process_record(1, tensor("x", [2], [1])), process_record(5, tensor("x", [2], [1]), qualname="M.forward")]
    )
    store_records(file, old)
    store_records(file, merge_records([process_record(3, tensor("x", [7], [1]))]))
    assert {item.qualname: item.count for item in read_records(file)} == {"f": 3, "M.forward": 5}
    assert find_record(target(TargetKind.MODULE, "M"), file) == find_record(
        target(TargetKind.METHOD, "M.forward"), file
    )
    assert find_record(target(name="g"), file) is None
    assert [path.name for path in tmp_path.iterdir()] == [RECORDS]


def test_an_error_names_the_line_of_a_damaged_file(tmp_path: Path) -> None:
    file = tmp_path / RECORDS
    store_records(file, merge_records([process_record(1, tensor("x", [2], [1]))]))
    with file.open("a") as stream:
        stream.write('{"path": 3}\n')
    with pytest.raises(RequestError, match="file of recorded calls is invalid") as caught:
        read_records(file)
    assert caught.value.where is not None and caught.value.where.line == 2


def test_the_recorder_identifies_functions_by_the_first_line_of_their_code() -> None:
    text = """\
import torch

@torch.no_grad()
@other
def decorated(x):
    def inner(x):
        return x
    return inner(x)

class Outer:
    @staticmethod
    def free(x): ...
    class Inner:
        def method(self, x): ...

if True:
    def conditional(x): ...

@triton.jit
def kernel(x): ...
act = lambda x: x
several = lambda x: map(lambda y: y, x)
"""
    functions = functions_of(text)
    assert functions == {
        3: ("decorated", False),
        6: ("decorated.inner", False),
        14: ("Outer.Inner.method", True),
        17: ("conditional", False),
        21: ("act", False),
    }
    # Code objects have the same first lines.
    lines = {
        item.co_name: item.co_firstlineno
        for item in compile(text, "m.py", "exec").co_consts
        if hasattr(item, "co_name")
    }
    assert (lines["decorated"], lines["conditional"]) == (3, 17)
    assert functions_of("def broken(:\n") == {}


def container(name: str, kind: str, keys: list[Any], *items: dict[str, Any], class_name: str = "") -> dict[str, Any]:
    described = {"kind": kind, "keys": keys, "class_name": class_name}
    return {"name": name, "container": described, "items": list(items)}


def test_containers_are_merged_by_structure_and_become_a_directive_that_can_be_read() -> None:
    def call(step: int, high: int) -> list[Any]:
        index = tensor("c.index", [4], [1], "int64", low=0, high=high)
        return process_record(
            1,
            tensor("x", [2], [1]),
            container("p", "tuple", [0, 1], tensor("p[0]", [2, 3], [0, 1]), {"name": "p[1]", "constant": "a"}),
            container("c", "fields", ["index", "step"], index, {"name": "c.step", "constant": step}, class_name="C"),
            container("d", "dict", ["k"], container("d['k']", "list", [0], tensor("d['k'][0]", [2], [1]))),
        )

    (record,) = merge_records([call(1, 3), call(2, 9)])
    (recorded,) = record.calls
    assert (recorded.count, recorded.varying, recorded.unusable) == (2, ("c.step",), "")
    assert recorded.directive == (
        "# mtmc: x=f32[2] p=(f32[2,3]{0,1},'a') c=C(index=i64[4]@0..9,step=1) d={'k': [f32[2]]}"
    )
    workload = workload_from_record(target(), record)
    assert workload is not None
    assert "c.step varied between calls; the workload uses 1" in workload.assumed
    text = f"{recorded.directive}\ndef f(x, p, c, d): ...\n".encode()
    parsed = parse_directive(text, find_target(text, "/p/m.py", "f"), "/p/m.py")
    assert parsed is not None
    assert parsed.arguments == workload.arguments
    other = process_record(5, tensor("x", [2], [1]), container("p", "tuple", [0], tensor("p[0]", [2, 3], [0, 1])))
    assert len(merge_records([call(1, 3), other])[0].calls) == 2


def test_a_container_with_something_unknown_in_it_is_named() -> None:
    unknown = container("c", "fields", ["f"], {"name": "c.f", "other": "function"}, class_name="C")
    (record,) = merge_records([process_record(1, tensor("x", [2], [1]), unknown)])
    assert record.calls[0].unusable == "argument 'c.f' was a function"
