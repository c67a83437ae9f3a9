"""Workspaces that are made to block the server: it answers meanwhile, and says what it does not analyse or cannot read."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from editor import Editor, editor
from lsprotocol import types as lsp

from mtmc_lsp.search.store import Store
from tests.hostile import damage_store

pytestmark = pytest.mark.asyncio

HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
SMALL = HEAD + "def f(x):\n    return torch.relu(x) + 1\n"
KERNEL = "@triton.jit\ndef k(x_ptr, n, B: tl.constexpr):\n"
ORDINARY = HEAD + "".join(
    f"def f{number}(x, y):\n    z = torch.relu(x) * {number}\n    return z + y.sum(-1)\n\n\n" for number in range(3500)
)
"""About as long as the longest file that is analysed."""
SECONDS = 1.0
"""Limit for the processor time of an answer, on a machine that needs less than ``1 / FACTOR`` of it for ``ORDINARY``."""
FACTOR = 8
"""The worst text here takes 3 to 4 times as long as ``ORDINARY``; a superlinear analysis takes hundreds of times as long."""
WAIT_SECONDS = 4.0
"""Limit for the time of an answer; everything that waits for a file, a lock or a process waits longer."""


def nested(line: str, depth: int) -> str:
    return "".join(f"{'    ' * level}{line.format(level)}\n" for level in range(depth)) + f"{'    ' * depth}pass\n"


TEXTS: dict[str, Callable[[], str]] = {
    "a sum of 750 terms": lambda: f"{HEAD}{KERNEL}    x = {' + '.join(['1'] * 750)}\n",
    "a sum of 35000 terms": lambda: f"{HEAD}{KERNEL}    x = {' + '.join(['1'] * 35_000)}\n",
    "a sum of loads": lambda: f"{HEAD}{KERNEL}    x = {' + '.join(['tl.load(x_ptr)'] * 900)}\n",
    "3600 comments": lambda: HEAD + ("# " + "x" * 78 + "\n") * 3600 + SMALL,
    "comments in a kernel": lambda: HEAD + KERNEL + ("    # " + "x" * 74 + "\n") * 3600 + "    x = 1\n",
    "deep brackets": lambda: f"{HEAD}{KERNEL}    x = {'(' * 70_000}1{')' * 70_000}\n",
    "open brackets": lambda: f"{HEAD}{KERNEL}    x = {'(' * 145_000}\n",
    "a chain of attributes": lambda: f"{HEAD}{KERNEL}    x = x{'.a' * 70_000}\n",
    "a chain of calls": lambda: f"{HEAD}{KERNEL}    x = x{'.a()' * 70_000}\n",
    "a chain of assignments": lambda: f"{HEAD}x = {'y = ' * 70_000}1\n",
    "a chain of lambdas": lambda: f"{HEAD}x = {'lambda: ' * 35_000}1\n",
    "nested functions": lambda: HEAD + nested("def f{}(x):", 370),
    "nested conditions": lambda: HEAD + KERNEL + nested("    if x:", 300),
    "a kernel of 3000 lines": lambda: (
        HEAD + KERNEL + "".join(f"    x{i + 1} = tl.load(x_ptr + x{i} + n * x{i})\n" for i in range(3000))
    ),
    "a variable with 4000 values": lambda: HEAD + KERNEL + "    x = tl.load(x_ptr + x) + x\n" * 4000,
    "broken functions": lambda: HEAD + "".join(f"def f{i}(x:\n    return torch.relu(x\n\n\n" for i in range(6800)),
    "marks without an end": lambda: HEAD + "".join(f"# mtmc: begin f{i}\n# mtmc: begin f\n" for i in range(6800)),
    "one long line": lambda: f"{HEAD}x = '{'é' * 170_000}'\n{SMALL}",
    "40 MB": lambda: SMALL + "# \U0001f600 and more\n" * 2_500_000,
    "carriage returns": lambda: (HEAD + "def f(x):\n    return x\n\n\n" * 9000).replace("\n", "\r"),
    "null and surrogates": lambda: HEAD + "x = '\0\ud83d'\n\x0c\x0b\u2028def f(x):\n    return x\n" * 5000,
}


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


@contextmanager
def locked(folder: Path, _: str) -> Iterator[None]:
    Store(folder).close()
    with closing(sqlite3.connect(folder / "store.db", isolation_level=None)) as db:
        db.execute("pragma locking_mode=exclusive")
        db.execute("begin exclusive")
        yield


def later_version(folder: Path, _: str) -> None:
    with closing(sqlite3.connect(folder / "store.db")) as db:
        db.execute("pragma user_version=99")


def damaged(kind: str) -> Callable[[Path, str], None]:
    return lambda folder, path: damage_store(folder, kind, path)


STORES: dict[str, tuple[Callable[[Path, str], Any], str]] = {
    "garbage": (damaged("garbage"), "file is not a database. It is now store.db.damaged-"),
    "an endless view": (damaged("endless-view"), "it contains the view runs, which mtmc did not create. It is now"),
    "an endless trigger": (damaged("endless-trigger"), "it contains the trigger slow, which mtmc did not create."),
    "deep JSON": (damaged("deep-json"), "a document is no Environment (maximum recursion depth exceeded"),
    "a lock": (locked, "database is locked"),
    "a later version": (later_version, "has version 99, and this program reads version 3"),
    "a pipe": (lambda folder, _: os.mkfifo(folder / "store.db"), "is not a regular file"),
    "a link to a device": (lambda folder, _: (folder / "store.db").symlink_to("/dev/zero"), "is a symbolic link"),
}
PROJECTS: dict[str, Callable[[Path], object]] = {
    "settings in a pipe": lambda root: os.mkfifo(root / "pyproject.toml"),
    "settings in a device": lambda root: (root / "pyproject.toml").symlink_to("/dev/zero"),
    "settings of 8 GB": lambda root: sparse(root / "pyproject.toml"),
    "deep settings": lambda root: (root / "pyproject.toml").write_text(f"x = {'[' * 100_000}"),
    "a cycle of folders": lambda root: (root / ".mtmc").symlink_to(root),
    "a store that is a file": lambda root: (root / ".mtmc").write_text(""),
}
FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
    "8 GB": sparse,
}
URIS = (
    "file:///a%00b.py",
    f"file:///{'x' * 5000}.py",
    f"file:///{'y/' * 3000}m.py",
    "file://[/m.py",
    "file:",
    "file:///",
    "untitled:Untitled-1",
    "",
    "file:///%ff%fe.py",
    "file:///../../../../etc/passwd",
)


def processor_seconds(ide: Editor) -> float:
    """Processor time of the server so far."""
    fields = Path(f"/proc/{ide.client._server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def requests(ide: Editor, uri: str) -> None:
    """Everything that an editor requests when a file is shown."""
    document = lsp.TextDocumentIdentifier(uri)
    client, cursor = ide.client, lsp.Position(8, 8)
    await client.text_document_code_lens_async(lsp.CodeLensParams(document))
    await client.text_document_hover_async(lsp.HoverParams(document, cursor))
    context = lsp.CodeActionContext(diagnostics=[])
    await client.text_document_code_action_async(lsp.CodeActionParams(document, lsp.Range(cursor, cursor), context))
    await client.text_document_document_symbol_async(lsp.DocumentSymbolParams(document))
    await client.text_document_folding_range_async(lsp.FoldingRangeParams(document))
    await client.text_document_diagnostic_async(lsp.DocumentDiagnosticParams(document))


async def most_seconds(ide: Editor, uri: str) -> float:
    """Processor time of the slowest part of opening and editing a file, while another file gets its answers."""
    other = ide.open(SMALL, "other.py")
    await ide.lenses(other)
    slowest, used = 0.0, processor_seconds(ide)
    for _ in range(4):
        await requests(ide, uri)
        used, before = processor_seconds(ide), used
        slowest = max(slowest, used - before)
        began = time.monotonic()
        assert await ide.lenses(other) == []
        assert time.monotonic() - began < WAIT_SECONDS
        ide.change(uri, 0, 0, "\n")
    return slowest


def opened(ide: Editor, text: str, name: str = "model.py") -> str:
    return ide.open(text, name, on_disk=False)


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Processor time that an answer may take: ``FACTOR`` times that of an ordinary file of the largest size."""
    import asyncio

    async def measure() -> float:
        async with editor(tmp_path_factory.mktemp("user")) as ide:
            return await most_seconds(ide, opened(ide, ORDINARY))

    return max(SECONDS, FACTOR * asyncio.run(measure()))


@pytest.mark.parametrize("kind", TEXTS)
async def test_a_hostile_text_takes_no_longer_than_an_ordinary_one(tmp_path: Path, kind: str, allowed: float) -> None:
    async with editor(tmp_path) as ide:
        uri = opened(ide, TEXTS[kind]())
        assert await most_seconds(ide, uri) < allowed
        identifier = lsp.VersionedTextDocumentIdentifier(99, uri)
        whole = lsp.TextDocumentContentChangeWholeDocument(text=SMALL)
        ide.client.text_document_did_change(lsp.DidChangeTextDocumentParams(identifier, [whole]))
        ide.texts[uri], ide.versions[uri] = SMALL, 99
        answer = await ide.client.protocol.send_request_async("mtmc/text", {"uri": uri})
        assert answer.text == SMALL
        assert "optimize" in await ide.actions(uri, "torch.relu"), "the document is usable"
        assert [m.message for m in ide.client.log_messages if m.type == lsp.MessageType.Error] == []


NOTES = {
    "40 MB": (0, "This file has 40000 kB, and mtmc analyses files of up to 500 kB; move the functions"),
    "deep brackets": (5, "This statement is not analysed, because it is nested more than 1000 levels deep; split it."),
    "kernels": (0, "The static checks end here, after 150 kB of kernels; split this file."),
}


@pytest.mark.parametrize("kind", NOTES)
async def test_what_is_not_analysed_is_noted_in_its_first_line(tmp_path: Path, kind: str) -> None:
    kernel = KERNEL + "    x = tl.arange(0, 64)  # 12345678901234567890\n" * 18
    many = HEAD + "".join(f"{kernel.replace('def k', f'def k{number}')}" for number in range(300))
    line, words = NOTES[kind]
    async with editor(tmp_path) as ide:
        uri = opened(ide, many if kind == "kernels" else TEXTS[kind]())
        (note,) = await ide.until(lambda: ide.client.diagnostics.get(uri))
        assert note.message.startswith(words)
        assert (note.code, note.severity) == ("not-analysed", lsp.DiagnosticSeverity.Information)
        assert kind == "kernels" or note.range.start.line == line


async def test_a_file_with_carriage_returns_alone_shows_its_functions_and_says_how_to_optimise_them(
    tmp_path: Path,
) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(SMALL.replace("\n", "\r"))
        params = lsp.DocumentSymbolParams(lsp.TextDocumentIdentifier(uri))
        (symbol,) = await ide.client.text_document_document_symbol_async(params)
        assert (symbol.name, symbol.range.start.line, symbol.range.end.line) == ("f", 5, 6)
        job = await ide.command("optimize", uri, "f")
        message = await ide.finished(job["job"])
        assert message.endswith(
            "its lines end in carriage returns alone. Save the file with the line endings LF or CRLF."
        )


@pytest.mark.parametrize("kind", STORES)
async def test_a_hostile_store_gives_one_message_and_blocks_nothing(tmp_path: Path, kind: str) -> None:
    prepare, words = STORES[kind]
    folder = tmp_path / ".mtmc"
    folder.mkdir()
    if kind == "a later version":
        Store(folder).close()
    with ExitStack() as stack:
        prepared = prepare(folder, str(tmp_path / "model.py"))
        if kind == "a lock":
            stack.enter_context(prepared)
        async with editor(tmp_path) as ide:
            uri = ide.open(SMALL)
            assert await most_seconds(ide, uri) < SECONDS
            await ide.until(lambda: ide.client.messages)
            second = ide.open(SMALL, "second.py")
            await ide.client.protocol.send_request_async("mtmc/history", {"uri": second})
            assert await ide.client.protocol.send_request_async("mtmc/reviews", {"uri": uri}) == []
            (message,) = {m.message for m in ide.client.messages}
            assert words in message
    if "damaged-" in message:
        async with editor(tmp_path) as ide:
            assert "improved" in await ide.optimized(ide.open(SMALL), "f"), "the next run begins a new store"


@pytest.mark.parametrize("kind", PROJECTS)
async def test_a_hostile_project_blocks_nothing(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "user"
    root.mkdir()
    async with editor(root) as ide:
        (root / "pyproject.toml").unlink()
        PROJECTS[kind](root)
        uri = opened(ide, SMALL)
        ide.client.text_document_did_save(lsp.DidSaveTextDocumentParams(lsp.TextDocumentIdentifier(uri)))
        assert await most_seconds(ide, uri) < SECONDS


@pytest.mark.parametrize("kind", FILES)
async def test_a_hostile_file_is_neither_read_nor_waited_for(tmp_path: Path, kind: str) -> None:
    async with editor(tmp_path) as ide:
        FILES[kind](tmp_path / "model.py")
        uri = opened(ide, SMALL)
        ide.client.text_document_did_save(lsp.DidSaveTextDocumentParams(lsp.TextDocumentIdentifier(uri)))
        changed = lsp.FileEvent(uri, lsp.FileChangeType.Changed)
        ide.client.workspace_did_change_watched_files(lsp.DidChangeWatchedFilesParams([changed]))
        assert await most_seconds(ide, uri) < SECONDS


async def test_a_dependency_that_becomes_a_pipe_counts_as_changed(tmp_path: Path) -> None:
    text = SMALL.replace("def f", "import cfg\n\n\n# reads f: cfg.SCALE=2.0\ndef f")
    (tmp_path / "cfg.py").write_text("SCALE = 2.0\n")
    async with editor(tmp_path) as ide:
        uri = ide.open(text)
        assert "improved" in await ide.optimized(uri, "f")
        (tmp_path / "cfg.py").unlink()
        os.mkfifo(tmp_path / "cfg.py")
        changed = lsp.FileEvent(ide.uri("cfg.py"), lsp.FileChangeType.Changed)
        ide.client.workspace_did_change_watched_files(lsp.DidChangeWatchedFilesParams([changed]))
        assert await ide.command("keep", uri, "f") is False
        assert "SCALE" in ide.client.messages[-1].message


@pytest.mark.parametrize("uri", URIS)
async def test_a_wrong_uri_leaves_the_server_usable(tmp_path: Path, uri: str) -> None:
    async with editor(tmp_path) as ide:
        good = ide.open(SMALL)
        client, document = ide.client, lsp.TextDocumentIdentifier(uri)
        client.text_document_did_open(lsp.DidOpenTextDocumentParams(lsp.TextDocumentItem(uri, "python", 1, SMALL)))
        await requests(ide, uri)
        client.text_document_did_save(lsp.DidSaveTextDocumentParams(document))
        changed = lsp.DidChangeWatchedFilesParams([lsp.FileEvent(uri, lsp.FileChangeType.Changed)])
        client.workspace_did_change_watched_files(changed)
        client.workspace_did_rename_files(lsp.RenameFilesParams([lsp.FileRename(uri, good)]))
        client.text_document_did_close(lsp.DidCloseTextDocumentParams(document))
        assert "optimize" in await ide.actions(good, "torch.relu")
        errors = [m.message for m in client.log_messages if m.type == lsp.MessageType.Error]
        assert errors == [], json.dumps(errors)
