"""An editor for tests: a real client over stdio that stores document text, applies edits and answers questions."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.uris import from_fs_path, to_fs_path
from pytest_lsp import LanguageClient, make_test_lsp_client

from mtmc_lsp.process.isolation import isolated_command

HERE = Path(__file__).resolve().parent
FAKE = [sys.executable, str(HERE / "fake_server.py")]
REAL = [*isolated_command("mtmc_lsp.server.app")]


def capabilities(**changes: Any) -> lsp.ClientCapabilities:
    """Capabilities of a client that supports all features; ``changes`` replaces parts."""
    resolve = lsp.ClientCodeActionResolveOptions(properties=["edit", "command"])
    parts: dict[str, Any] = {
        "general": lsp.GeneralClientCapabilities(position_encodings=[lsp.PositionEncodingKind.Utf16]),
        "window": lsp.WindowClientCapabilities(
            work_done_progress=True, show_document=lsp.ShowDocumentClientCapabilities(support=True)
        ),
        "workspace": lsp.WorkspaceClientCapabilities(
            apply_edit=True,
            configuration=True,
            workspace_edit=lsp.WorkspaceEditClientCapabilities(
                document_changes=True,
                resource_operations=[lsp.ResourceOperationKind.Create, lsp.ResourceOperationKind.Delete],
                change_annotation_support=lsp.ChangeAnnotationsSupportOptions(),
            ),
            code_lens=lsp.CodeLensWorkspaceClientCapabilities(refresh_support=True),
        ),
        "text_document": lsp.TextDocumentClientCapabilities(
            code_action=lsp.CodeActionClientCapabilities(resolve_support=resolve, disabled_support=True),
            publish_diagnostics=lsp.PublishDiagnosticsClientCapabilities(related_information=True),
        ),
    }
    return lsp.ClientCapabilities(**{**parts, **changes})


class Editor:
    """A client with one workspace."""

    def __init__(self, client: LanguageClient, root: Path) -> None:
        self.client = client
        self.root = root
        self.texts: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.edits: list[lsp.ApplyWorkspaceEditParams] = []
        self.questions: list[lsp.ShowMessageRequestParams] = []
        self.answers: list[str | None] = []
        self.states: list[Any] = []
        self.registered: list[lsp.Registration] = []
        self.refreshed: list[str] = []
        self._listen()

    def _listen(self) -> None:
        client = self.client

        @client.feature(lsp.WORKSPACE_APPLY_EDIT)
        def apply_edit(params: lsp.ApplyWorkspaceEditParams) -> lsp.ApplyWorkspaceEditResult:
            self.edits.append(params)
            for change in params.edit.document_changes or []:
                assert not isinstance(change, lsp.RenameFile)
                if isinstance(change, lsp.CreateFile):
                    self.path(change.uri).touch(exist_ok=False)
                elif isinstance(change, lsp.DeleteFile):
                    self.delete(change.uri)
                elif not self._has_version(change.text_document):
                    return lsp.ApplyWorkspaceEditResult(applied=False, failure_reason="wrong document version")
                else:
                    self.apply(change.text_document.uri, list(change.edits))
            for uri, edits in (params.edit.changes or {}).items():
                self.apply(uri, list(edits))
            return lsp.ApplyWorkspaceEditResult(applied=True)

        @client.feature(lsp.WINDOW_SHOW_MESSAGE_REQUEST)
        def ask(params: lsp.ShowMessageRequestParams) -> lsp.MessageActionItem | None:
            self.questions.append(params)
            answer = self.answers.pop(0) if self.answers else None
            return lsp.MessageActionItem(answer) if answer else None

        @client.feature("mtmc/runState")
        def run_state(params: Any) -> None:
            self.states.append(params)

        @client.feature(lsp.CLIENT_REGISTER_CAPABILITY)
        def register(params: lsp.RegistrationParams) -> None:
            self.registered += params.registrations

        @client.feature(lsp.WORKSPACE_CODE_LENS_REFRESH)
        def lens_refresh(params: None) -> None:
            self.refreshed.append("lens")

        @client.feature(lsp.WORKSPACE_INLAY_HINT_REFRESH)
        def inlay_refresh(params: None) -> None:
            self.refreshed.append("inlay")

    # Files -------------------------------------------------------------------------------------------------------

    def uri(self, name: str = "model.py") -> str:
        uri = from_fs_path(str(self.root / name))
        assert uri is not None
        return uri

    def path(self, uri: str) -> Path:
        """Where a file is on disk."""
        return Path(to_fs_path(uri) or "")

    def _has_version(self, document: lsp.OptionalVersionedTextDocumentIdentifier) -> bool:
        """Whether an edit is for the current version of a file. A file that is not open is opened."""
        if document.uri not in self.texts:
            path = self.path(document.uri)
            self.open(path.read_bytes().decode(), str(path.relative_to(self.root)), on_disk=False)
            return document.version is None
        return document.version == self.versions[document.uri]

    def save(self, uri: str) -> None:
        """Save a file."""
        self.path(uri).write_bytes(self.texts[uri].encode())
        self.client.text_document_did_save(lsp.DidSaveTextDocumentParams(lsp.TextDocumentIdentifier(uri)))

    def delete(self, uri: str) -> None:
        """Delete a file, and close it if it is open."""
        self.path(uri).unlink()
        if self.texts.pop(uri, None) is not None:
            self.client.text_document_did_close(lsp.DidCloseTextDocumentParams(lsp.TextDocumentIdentifier(uri)))

    def open(self, text: str, name: str = "model.py", *, on_disk: bool = True) -> str:
        """Open a file and write it to disk."""
        if on_disk:
            (self.root / name).write_bytes(text.encode())
        uri = self.uri(name)
        self.texts[uri], self.versions[uri] = text, 1
        item = lsp.TextDocumentItem(uri, "python", 1, text)
        self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        return uri

    def change(self, uri: str, start: int, end: int, new: str) -> None:
        """Edit: replace characters ``start`` to ``end``."""
        text = self.texts[uri]
        range_ = lsp.Range(position(text, start), position(text, end))
        self.texts[uri] = text[:start] + new + text[end:]
        self.versions[uri] += 1
        self.client.text_document_did_change(
            lsp.DidChangeTextDocumentParams(
                lsp.VersionedTextDocumentIdentifier(self.versions[uri], uri),
                [lsp.TextDocumentContentChangePartial(range=range_, text=new)],
            )
        )

    def replace(self, uri: str, old: str, new: str) -> None:
        """Edit: replace the first occurrence of ``old``."""
        at = self.texts[uri].index(old)
        self.change(uri, at, at + len(old), new)

    def set(self, uri: str, text: str) -> None:
        """Replace the whole text, like undo or redo in the editor."""
        self.change(uri, 0, len(self.texts[uri]), text)

    def apply(self, uri: str, edits: list[Any]) -> None:
        """Apply edits from last to first, and notify the server."""
        text = self.texts[uri]
        spans = [(offset(text, e.range.start), offset(text, e.range.end), e.new_text) for e in edits]
        for start, end, new in sorted(spans, key=lambda span: span[0], reverse=True):
            self.change(uri, start, end, new)

    # Requests ----------------------------------------------------------------------------------------------------

    async def actions(self, uri: str, text: str, *, only: str | None = None) -> dict[str, lsp.CodeAction]:
        """The code actions at the first occurrence of ``text``, by the last part of their kind."""
        cursor = position(self.texts[uri], self.texts[uri].index(text))
        context = lsp.CodeActionContext(diagnostics=[], only=[only] if only else None)
        params = lsp.CodeActionParams(lsp.TextDocumentIdentifier(uri), lsp.Range(cursor, cursor), context)
        result = await self.client.text_document_code_action_async(params)
        actions = [_action(item) for item in result or []]
        return {str(getattr(a.kind, "value", a.kind)).rpartition(".")[2]: a for a in actions}

    async def command(self, name: str, uri: str = "", target: str = "", **more: Any) -> Any:
        """Run a command."""
        argument = {key: value for key, value in {"uri": uri, "target": target, **more}.items() if value}
        params = lsp.ExecuteCommandParams(command=f"mtmc.{name}", arguments=[argument])
        return await self.client.workspace_execute_command_async(params)

    async def lenses(self, uri: str) -> list[str]:
        """The titles of the code lenses, in order."""
        lenses = await self.client.text_document_code_lens_async(lsp.CodeLensParams(lsp.TextDocumentIdentifier(uri)))
        return [lens.command.title for lens in lenses or [] if lens.command is not None]

    async def optimized(self, uri: str, target: str) -> str:
        """Run the search to its end. Returns the final message."""
        job = await self.command("optimize", uri, target)
        return await self.finished(job["job"])

    async def finished(self, job: int) -> str:
        """Wait for the end of a job. Returns its final message."""
        return (await self.until(lambda: self._end_of(job))).message or ""

    def _end_of(self, job: int) -> Any:
        ends = [v for v in self.reported(job) if isinstance(v, lsp.WorkDoneProgressEnd)]
        return ends[-1] if ends else None

    def reported(self, job: int) -> list[Any]:
        """All progress values of a job, in order."""
        return list(self.client.progress_reports.get(f"mtmc-{job}", []))

    def stages(self, job: int) -> list[str]:
        """The progress messages of a job, without the time in the messages of a run."""
        return [re.sub(r" \(\d+ s, \d+ s left\)$", "", str(value.message)) for value in self.reported(job)]

    async def until(self, condition: Callable[[], Any], seconds: float = 240.0) -> Any:
        """Wait until ``condition`` is truthy. Returns its value."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not (value := condition()):
            assert asyncio.get_running_loop().time() < deadline, "timeout"
            await asyncio.sleep(0.02)
        return value

    async def until_async(self, request: Callable[[], Awaitable[Any]], seconds: float = 60.0) -> Any:
        """Repeat a request until its answer is truthy. Returns the answer."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not (value := await request()):
            assert asyncio.get_running_loop().time() < deadline, "timeout"
            await asyncio.sleep(0.05)
        return value


def _action(item: lsp.CodeAction | lsp.Command) -> lsp.CodeAction:
    """The action as sent. lsprotocol parses an action that contains a command as a command whose name is a dictionary."""
    if isinstance(item, lsp.CodeAction):
        return item
    command = ast.literal_eval(item.command)
    full_command = lsp.Command(command["title"], command["command"], arguments=command["arguments"])
    return lsp.CodeAction(item.title, kind=command["command"], command=full_command)


def position(text: str, offset: int) -> lsp.Position:
    """The UTF-16 position of a character."""
    line = text.count("\n", 0, offset)
    start = text.rfind("\n", 0, offset) + 1
    return lsp.Position(line, len(text[start:offset].encode("utf-16-le")) // 2)


def offset(text: str, at: lsp.Position) -> int:
    """The inverse of :func:`position`."""
    start = 0
    for _ in range(at.line):
        start = text.index("\n", start) + 1
    units = 0
    while units < at.character:
        units += 2 if ord(text[start]) > 0xFFFF else 1
        start += 1
    return start


@asynccontextmanager
async def editor(
    root: Path,
    command: list[str] = FAKE,
    *,
    options: Any = None,
    client_capabilities: Any = None,
    settings: Any = None,
    cwd: Path | None = None,
    variables: dict[str, str] | None = None,
) -> AsyncIterator[Editor]:
    """An editor with a server that ends with it. The server runs in ``cwd`` with additional environment ``variables``."""
    (root / "pyproject.toml").touch()
    client = make_test_lsp_client()
    environment = {**os.environ, "XDG_STATE_HOME": str(root.parent / f"{root.name}-state"), **(variables or {})}
    ide = Editor(client, root)
    client.set_configuration(settings or {}, section="mtmc")
    await client.start_io(*command, env=environment, cwd=cwd)
    try:
        await client.initialize_session(
            lsp.InitializeParams(
                capabilities=client_capabilities or capabilities(),
                initialization_options={"trusted": True} if options is None else options,
                workspace_folders=[lsp.WorkspaceFolder(from_fs_path(str(root)) or "", "user")],
            )
        )
        yield ide
        await asyncio.wait_for(client.shutdown_session(), 10)
    finally:
        # Otherwise a failed test and the server would wait for each other.
        if client._server is not None and client._server.returncode is None:
            client._server.kill()
        await client.stop()
