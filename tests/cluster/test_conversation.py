"""Processes that stay open and answer several requests."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from services import program, worker

from mtmc_lsp.core.errors import FailureKind, WorkerFailed

ECHO = """
def answer(opening, command, data):
    print("libraries may print", flush=True)
    return [os.getpid(), opening, command, data]
"""
FAULTS = """
def answer(opening, command, data):
    if command == "refuse":
        raise RequestError("no such target", where=Location("model.py", 3), remedy="Name another.")
    if command == "die":
        print("something went wrong", flush=True)
        os._exit(3)
    if command == "hang":
        if data:
            open(data, "w").close()
        while True:
            time.sleep(1)
    return os.getpid()
"""


def test_a_process_answers_requests_of_the_same_target_and_ends_with_the_next_target() -> None:
    with worker() as place:
        first = [place.ask(program(ECHO), "a", {"target": "f"}, "compile", [1], 60.0)["result"] for _ in range(2)]
        assert first[0] == first[1]
        pid = first[0][0]
        assert first[0][1:] == [{"target": "f"}, "compile", [1]]
        other = place.ask(program(ECHO), "b", {"target": "g"}, "compile", [1], 60.0)["result"]
        assert other[0] != pid
        assert other[1] == {"target": "g"}
        assert not Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{other[0]}").exists()


def test_large_requests_and_answers_pass() -> None:
    text = "x" * (3 << 20)
    with worker() as place:
        answer = place.ask(program(ECHO), "a", {}, "compile", text, 60.0)["result"]
    assert answer[3] == text


def test_an_error_is_an_answer_and_the_process_stays() -> None:
    with worker() as place:
        pid = place.ask(program(FAULTS), "a", {}, "work", None, 60.0)["result"]
        error = place.ask(program(FAULTS), "a", {}, "refuse", None, 60.0)["error"]
        assert (error["code"], error["message"], error["line"]) == ("request", "no such target", 3)
        assert place.ask(program(FAULTS), "a", {}, "work", None, 60.0)["result"] == pid


def test_an_error_of_the_opening_answers_every_request() -> None:
    code = "@contextlib.contextmanager\ndef prepare(opening):\n    raise RequestError('no file')\n    yield\n"
    with worker() as place:
        for _ in range(2):
            assert place.ask(program(code), "a", {}, "work", None, 60.0)["error"]["message"] == "no file"


def test_a_process_that_dies_is_reported_with_its_last_words_and_the_next_request_starts_another() -> None:
    with worker() as place:
        pid = place.ask(program(FAULTS), "a", {}, "work", None, 60.0)["result"]
        with pytest.raises(WorkerFailed, match="the process for die ended with code 3: something went wrong") as caught:
            place.ask(program(FAULTS), "a", {}, "die", None, 60.0)
        assert caught.value.kind is FailureKind.CRASHED
        assert place.ask(program(FAULTS), "a", {}, "work", None, 60.0)["result"] != pid


def test_a_request_that_takes_too_long_ends_the_process() -> None:
    with worker() as place:
        pid = place.ask(program(FAULTS), "a", {}, "work", None, 60.0)["result"]
        with pytest.raises(WorkerFailed, match="hang took longer than 1 s") as caught:
            place.ask(program(FAULTS), "a", {}, "hang", None, 1.0)
        assert caught.value.kind is FailureKind.TIMEOUT
        assert not Path(f"/proc/{pid}").exists()


def test_stopping_ends_a_request_in_progress(tmp_path: Path) -> None:
    errors: list[Any] = []
    began = tmp_path / "began"

    def ask() -> None:
        try:
            place.ask(program(FAULTS), "a", {}, "hang", str(began), 600.0)
        except WorkerFailed as error:
            errors.append(error.kind)

    with worker() as place:
        thread = threading.Thread(target=ask)
        thread.start()
        while not began.exists():
            time.sleep(0.02)
        place.processes.stop()
        thread.join()
    assert errors == [FailureKind.CRASHED]
