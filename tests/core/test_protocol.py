"""Requests and answers of workers survive the pipe, and each failure has its kind."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtmc_lsp.app.messages import CompilerProbe, InterpreterProbe, SandboxProbe
from mtmc_lsp.capture.messages import CaptureRequest
from mtmc_lsp.core.errors import FailureKind, MtmcError, OutOfMemory, TargetRaises, WorkerFailed
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import ArgumentSpec, CapturedArgument
from mtmc_lsp.process.protocol import Request, decode_answer, encode_answer, encode_error, typed_answer
from mtmc_lsp.process.worker import main
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.timing.messages import RankRequest
from tests.core.test_worker import plain_request, request

MESSAGES = [
    getattr(importlib.import_module(f"mtmc_lsp.{command.rpartition('.')[0]}.messages"), kind)
    for command, (kind, _) in main.COMMANDS.items()
]
ANSWERS = [kind.answer for kind in MESSAGES]

finite = st.floats(allow_nan=False)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), finite, st.text(max_size=5))
sizes = st.one_of(st.integers(0, 99).map(Size.of), st.sampled_from(["n", "2*n", "n + 1"]).map(Size.parse))
constants = st.dictionaries(st.text(max_size=5), scalars, max_size=2)
graphs = st.builds(Graph, constants=constants, nodes=st.just(()))
st.register_type_strategy(float, finite)
st.register_type_strategy(Size, sizes)
st.register_type_strategy(Graph, graphs)
for kind in (ArgumentSpec, CapturedArgument):
    st.register_type_strategy(kind, st.builds(kind, constant=scalars))
st.register_type_strategy(KernelLaunch, st.builds(KernelLaunch, constexprs=constants))


def values(kind: type) -> st.SearchStrategy[Any]:
    """Values of a message type, with short collections: what a collection holds matters here, not how much."""
    fields = {
        field.name: hint for field in dataclasses.fields(kind) if (hint := typing.get_type_hints(kind)[field.name])
    }
    return st.builds(kind, **{name: _values(hint) for name, hint in fields.items()})


def _values(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(_values(arguments[0]), max_size=2).map(tuple)
    if origin is Mapping:
        return st.dictionaries(st.from_type(arguments[0]), _values(arguments[1]), max_size=2)
    return st.from_type(hint)


@pytest.mark.parametrize(
    "kind", [*MESSAGES, *ANSWERS, InterpreterProbe, CompilerProbe, SandboxProbe], ids=lambda kind: kind.__name__
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_request_and_answer_survives_json(kind: type, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    assert from_json(kind, json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize(("command", "kind"), list(zip(main.COMMANDS, MESSAGES, strict=True)), ids=main.COMMANDS)
def test_each_command_has_a_handler_that_takes_its_request_and_returns_its_answer(command: str, kind: type) -> None:
    module, function = main.COMMANDS[command][1].split(":")
    worker = importlib.import_module(f"mtmc_lsp.{command.rpartition('.')[0]}.worker.{module}")
    hints = typing.get_type_hints(getattr(worker, function))
    assert issubclass(kind, Request)
    assert kind.command == command
    assert hints == {"request": kind, "return": kind.answer}


@dataclasses.dataclass(frozen=True)
class Everything:
    """One field for each kind of value that the codec knows."""

    raw: bytes
    kind: FailureKind
    by_line: Mapping[int, tuple[str, ...]]
    by_kind: Mapping[FailureKind, float]
    pair: tuple[int, str]
    maybe: int | None = None


@settings(deadline=None)
@given(st.builds(Everything))
def test_bytes_enums_mappings_and_tuples_survive_json(value: Everything) -> None:
    assert from_json(Everything, json.loads(json.dumps(to_json(value)))) == value


GOOD: dict[str, Any] = {"raw": "", "kind": "crashed", "by_line": {}, "by_kind": {}, "pair": [1, "a"]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"raw": "?"}, "raw"),
        ({"kind": "bored"}, "kind"),
        ({"by_line": {"x": []}}, "by_line"),
        ({"by_line": []}, "by_line"),
        ({"pair": [True, "a"]}, r"pair\[0\]"),
        ({"more": 1}, "more"),
    ],
)
def test_data_that_does_not_fit_is_an_error_that_names_the_field(change: dict[str, Any], field: str) -> None:
    assert from_json(Everything, GOOD)
    with pytest.raises(TypeError, match=field):
        from_json(Everything, {**GOOD, **change})


def test_a_missing_field_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="'pair'"):
        from_json(Everything, {name: value for name, value in GOOD.items() if name != "pair"})


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=values(RankRequest))
def test_a_repeated_field_is_decoded_once(value: RankRequest) -> None:
    first, again = (from_json(RankRequest, to_json(dataclasses.replace(value, seconds=s))) for s in (1.0, 2.0))
    assert first.capture is again.capture
    other = dataclasses.replace(value.capture, flops=value.capture.flops + 1.0 if value.capture.flops < 1e9 else 0.0)
    assert from_json(RankRequest, to_json(dataclasses.replace(value, capture=other))).capture == other


# Failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FailureKind)
def test_an_error_keeps_its_kind_and_class_on_the_pipe(kind: FailureKind) -> None:
    error = WorkerFailed("it failed", remedy="Try again.", kind=kind)
    with pytest.raises(WorkerFailed) as caught:
        decode_answer(encode_error(error, "t").encode(), "t", "timing.time")
    assert (caught.value.kind, caught.value.message, caught.value.remedy) == (kind, "it failed", "Try again.")


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b"[]\n",
        b'{"result": {}}\n',
        b'{"token": "other", "result": {}}\n',
        b'{"token": "t"}\n',
        b'{"token": "t", "error": []}\n',
        b'{"token": "t", "error": {"kind": "bored"}}\n',
    ],
)
def test_a_line_that_is_no_answer_is_a_bad_answer(line: bytes) -> None:
    with pytest.raises(WorkerFailed) as caught:
        decode_answer(line, "t", "timing.time")
    assert caught.value.kind is FailureKind.BAD_ANSWER


def test_an_answer_of_another_type_is_a_bad_answer() -> None:
    ask = RankRequest(capture=None, user_source=None, sources=())  # type: ignore[arg-type]
    good = decode_answer(encode_answer({"medians_us": [1.0, None]}, "t").encode(), "t", ask.command)
    assert typed_answer(ask, good).medians_us == (1.0, None)
    with pytest.raises(WorkerFailed, match="medians_us") as caught:
        typed_answer(ask, {"medians_us": "fast"})
    assert caught.value.kind is FailureKind.BAD_ANSWER


OVER_LIMIT = "import torch\n# mtmc: x=f32[4,8]\ndef f(x):\n    y = torch.ones(1 << 31)\n    return x + 1\n"


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory):
    with Worker(sys.executable, cwd=str(tmp_path_factory.mktemp("cwd")), memory_bytes=4 << 30) as worker:
        yield worker


@pytest.mark.parametrize(
    ("body", "seconds", "error", "kind"),
    [
        ("import os\nos._exit(7)", 100, WorkerFailed, FailureKind.CRASHED),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", 100, WorkerFailed, FailureKind.KILLED),
        ("import time\ntime.sleep(60)", 12, WorkerFailed, FailureKind.TIMEOUT),
        ("import sys\nsys.exit(1)", 100, TargetRaises, FailureKind.EXITED),
        ("raise ValueError('out of memory, CUDA error: no')", 100, TargetRaises, FailureKind.EXCEPTION),
        ("x = bytearray(6 << 30)", 100, OutOfMemory, FailureKind.OUT_OF_MEMORY),
        (OVER_LIMIT, 100, OutOfMemory, FailureKind.OUT_OF_MEMORY),
    ],
    ids=["exit", "killed", "hang", "sys.exit", "exception", "memory of Python", "memory of torch"],
)
def test_each_failure_of_a_worker_has_its_kind(
    limited: Worker, tmp_path: Path, body: str, seconds: float, error: type[MtmcError], kind: FailureKind
) -> None:
    path = tmp_path / "m.py"
    asked: CaptureRequest = request(path, body) if "mtmc:" in body else plain_request(path, body)
    with pytest.raises(error) as caught:
        limited.call(asked, seconds)
    assert caught.value.kind is kind
