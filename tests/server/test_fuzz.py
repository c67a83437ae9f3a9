"""User actions in random order: client and server have the same text, nothing is lost, and the server reports no error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from editor import Editor, editor, position
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams

from mtmc_lsp.source.compose import strip_generated

MODEL = """\
# fake f: better better better
# fake Ünïcødé.g: sleep
import torch
import triton.language as tl


# mtmc: x=f32[8,48]
def f(x):
    return torch.relu(x) + 1


class Ünïcødé(torch.nn.Module):
    def g(self, x):
        return x  # 漢字 😀
"""
LONG = bool(os.environ.get("MTMC_FUZZ"))
"""If set, run at least 5,000 steps; by default a few hundred."""
MIN_STEPS = 5000
PIECES = [
    "x",
    " ",
    "\n",
    "\r\n",
    "é",
    "😀",
    "(",
    ")",
    '"""',
    "#",
    "def f(x):\n    return x\n",
    "# mtmc: end f\n",
    "\t",
    "\x0c",
]
MARKS = (b"# mtmc: begin f", b"# mtmc: end f", b"# mtmc: dispatch")


class Session(RuleBasedStateMachine):
    """A user at an editor."""

    steps_run = 0
    """Number of steps in all sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = contextlib.AsyncExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="mtmc-fuzz-"))
        self.is_open = False

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 180))

    @initialize()
    def start(self) -> None:
        (self.folder / "user").mkdir()
        self.ide: Editor = self.wait(self.stack.enter_async_context(editor(self.folder / "user")))
        self.open(MODEL)

    def open(self, text: str) -> None:
        self.uri = self.ide.open(text)
        self.is_open = True

    def teardown(self) -> None:
        try:
            self.wait(self.stack.aclose())
        finally:
            self.loop.close()
            shutil.rmtree(self.folder)

    # What a user does --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.is_open)
    @rule(where=st.floats(0, 1), length=st.integers(0, 12), new=st.lists(st.sampled_from(PIECES), max_size=3))
    def types(self, where: float, length: int, new: list[str]) -> None:
        text = self.ide.texts[self.uri]
        start = self.between(int(where * len(text)))
        self.ide.change(self.uri, start, self.between(min(len(text), start + length)), "".join(new))

    def between(self, at: int) -> int:
        """The offset, moved out of a line ending."""
        text = self.ide.texts[self.uri]
        return at + 1 if text[at - 1 : at] == "\r" and text[at : at + 1] == "\n" else at

    @precondition(lambda self: self.is_open)
    @rule()
    def starts_again(self) -> None:
        self.ide.set(self.uri, MODEL)

    @precondition(lambda self: self.is_open)
    @rule(name=st.sampled_from(["f", "Ünïcødé.g"]))
    def optimises(self, name: str) -> None:
        self.command("optimize", target=name)

    @precondition(lambda self: self.is_open)
    @rule()
    def optimises_to_the_end(self) -> None:
        self.command("cancel")
        answer = self.command("optimize", target="f")
        if isinstance(answer, dict):
            self.wait(self.ide.finished(answer["job"]))

    @rule()
    def cancels(self) -> None:
        self.command("cancel")

    @precondition(lambda self: self.is_open)
    @rule(name=st.sampled_from(["keep", "keepAll", "undo", "undoAll", "tryAnother", "diff", "resume"]))
    def decides(self, name: str) -> None:
        self.ide.answers = ["Replace"]
        before = self.ide.texts[self.uri].encode()
        self.command(name, target="f")
        after = self.ide.texts[self.uri].encode()
        if len({before.count(mark) for mark in MARKS}) == 1 and before.count(MARKS[0]) < 2:
            assert strip_generated(after, "f") == strip_generated(before, "f"), "the user's own text was changed"

    @precondition(lambda self: self.is_open)
    @rule(where=st.floats(0, 1))
    def looks(self, where: float) -> None:
        text = self.ide.texts[self.uri]
        at = position(text, self.between(int(where * len(text))))
        document = lsp.TextDocumentIdentifier(self.uri)
        client = self.ide.client
        self.wait(client.text_document_hover_async(lsp.HoverParams(document, at)))
        self.wait(client.text_document_code_lens_async(lsp.CodeLensParams(document)))
        context = lsp.CodeActionContext(diagnostics=[])
        self.wait(client.text_document_code_action_async(lsp.CodeActionParams(document, lsp.Range(at, at), context)))
        self.wait(client.text_document_diagnostic_async(lsp.DocumentDiagnosticParams(document)))
        self.wait(client.text_document_document_symbol_async(lsp.DocumentSymbolParams(document)))
        self.wait(client.text_document_folding_range_async(lsp.FoldingRangeParams(document)))

    @precondition(lambda self: self.is_open)
    @rule()
    def closes(self) -> None:
        self.ide.client.text_document_did_close(lsp.DidCloseTextDocumentParams(lsp.TextDocumentIdentifier(self.uri)))
        self.is_open = False

    @precondition(lambda self: not self.is_open)
    @rule()
    def opens(self) -> None:
        self.open(self.ide.texts[self.uri])

    def command(self, name: str, target: str = "") -> Any:
        """Run a command. The only allowed error is that the target does not exist in the current file."""
        try:
            return self.wait(self.ide.command(name, self.uri if target else "", target))
        except JsonRpcInvalidParams as error:
            if "no target" not in str(error):
                raise
            return None

    # What must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def a_step_was_taken(self) -> None:
        Session.steps_run += 1

    @invariant()
    def both_sides_have_the_same_text(self) -> None:
        if not self.is_open:
            return
        answer = self.wait(self.ide.client.protocol.send_request_async("mtmc/text", {"uri": self.uri}))
        assert (answer.text, answer.version) == (self.ide.texts[self.uri], self.ide.versions[self.uri])

    @invariant()
    def the_server_says_no_error_of_its_own(self) -> None:
        if hasattr(self, "ide"):
            assert [m.message for m in self.ide.client.log_messages if m.type == lsp.MessageType.Error] == []
            assert not [m.message for m in self.ide.client.messages if "exit code" in m.message]


def test_any_order_of_edits_requests_and_decisions() -> None:
    sessions = settings(
        max_examples=125 if LONG else 6,
        stateful_step_count=50 if LONG else 40,
        # The default run is deterministic; only the long run explores new sessions.
        derandomize=not LONG,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    Session.steps_run = 0
    run_state_machine_as_test(Session, settings=sessions)
    while LONG and Session.steps_run < MIN_STEPS:
        # Sessions may be shorter than the maximum.
        run_state_machine_as_test(Session, settings=sessions)
    print(f"{Session.steps_run} steps")
