"""A worker's hang, crash or exhaustion is one clear error, and the next call works."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mtmc_lsp.core.errors import EnvironmentNotAble, TargetRaises, WorkerFailed
from mtmc_lsp.core.jsonable import to_json
from mtmc_lsp.core.worker import Worker
from mtmc_lsp.source.directive import parse_directive
from mtmc_lsp.source.targets import find_target

GOOD = "import torch\n# mtmc: x=f32[4,8]\ndef f(x):\n    print('noise on stdout')\n    return x + 1\n"


def request(path: Path, text: str) -> dict:
    path.write_text(text)
    target = find_target(text.encode(), str(path), "f")
    return {"workload": to_json(parse_directive(text.encode(), target, str(path))), "variables": {}}


def test_user_code_that_prints_does_not_disturb_the_answers(tmp_path: Path) -> None:
    with Worker(sys.executable, cwd=str(tmp_path)) as worker:
        answer = worker.call("capture.capture", request(tmp_path / "m.py", GOOD), 100)
    assert answer["graph"]["nodes"][0]["op"] == "aten.add.Tensor"


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("    import time\n    time.sleep(60)", "timeout", "took longer than"),
        ("    import os\n    os._exit(7)", "crashed", "exit code 7"),
        ("    import ctypes\n    ctypes.string_at(0)", "crashed", "SIGSEGV"),
    ],
)
def test_a_hang_or_crash_is_told_and_the_next_call_works(tmp_path: Path, body: str, kind: str, words: str) -> None:
    bad = f"import torch\n# mtmc: x=f32[4,8]\ndef f(x):\n{body}\n    return x\n"
    with Worker(sys.executable, cwd=str(tmp_path)) as worker:
        with pytest.raises(WorkerFailed, match=words) as caught:
            worker.call("capture.capture", request(tmp_path / "bad.py", bad), 25 if kind == "timeout" else 100)
        assert caught.value.kind == kind
        assert worker.call("capture.capture", request(tmp_path / "good.py", GOOD), 100)


def test_what_user_code_raises_names_its_line(tmp_path: Path) -> None:
    bad = "import torch\n# mtmc: x=f32[4,8]\ndef f(x):\n    y = x.sum()\n    return x @ x\n"
    with Worker(sys.executable, cwd=str(tmp_path)) as worker, pytest.raises(TargetRaises) as caught:
        worker.call("capture.capture", request(tmp_path / "m.py", bad), 100)
    assert caught.value.where is not None
    assert caught.value.where.line == 5


def test_an_interpreter_that_is_not_there_is_an_environment_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentNotAble, match="no-such-python"):
        Worker(str(tmp_path / "no-such-python"), cwd=str(tmp_path)).call("capture.capture", {}, 5)
