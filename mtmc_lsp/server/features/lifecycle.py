"""Lifecycle of a connection: options, settings, open files and changes outside the editor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp

from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.store import STORE
from mtmc_lsp.server.features.diagnostics import settle_later
from mtmc_lsp.server.options import SECTION, read_options, read_settings
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import path_of
from mtmc_lsp.server.trust import Trust

WATCHER = "mtmc-watch"
CONFIGURATION = "mtmc-configuration"


def register(server: Server) -> None:
    """Register the handlers that synchronise the server with the client."""
    server.feature(lsp.INITIALIZE)(initialize)
    server.feature(lsp.INITIALIZED)(initialized)
    server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)(did_open)
    server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)(did_close)
    server.feature(lsp.TEXT_DOCUMENT_DID_SAVE)(did_save)
    server.feature(lsp.WORKSPACE_DID_CHANGE_CONFIGURATION)(did_change_configuration)
    server.feature(lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES)(did_change_watched_files)
    python = lsp.FileOperationFilter(lsp.FileOperationPattern("**/*.py"), "file")
    renames = lsp.FileOperationRegistrationOptions([python])
    server.feature(lsp.WORKSPACE_DID_RENAME_FILES, renames)(did_rename)
    server.feature(lsp.SHUTDOWN)(shutdown)
    server.feature("mtmc/text")(text)


def initialize(ls: Server, params: lsp.InitializeParams) -> None:
    """Store the client's options."""
    ls.options = read_options(params.initialization_options)
    ls.trust = Trust(whole_workspace=ls.options.trusted)
    if params.process_id is not None:
        ls.client_watcher(params.process_id)


async def initialized(ls: Server, params: lsp.InitializedParams) -> None:
    """Read the settings, and subscribe to settings changes and to file changes outside the editor."""
    workspace = ls.client_capabilities.workspace
    if workspace is None:
        ls.is_configured.set()
        return
    registrations = []
    watched, configured = workspace.did_change_watched_files, workspace.did_change_configuration
    if watched is not None and watched.dynamic_registration:
        # Also watch the store, so that runs from a terminal appear in the editor.
        patterns = ("**/*.py", "**/pyproject.toml", f"**/{FOLDER}/{STORE}*")
        watchers = lsp.DidChangeWatchedFilesRegistrationOptions([lsp.FileSystemWatcher(p) for p in patterns])
        registrations.append(lsp.Registration(WATCHER, lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES, watchers))
    if configured is not None and configured.dynamic_registration:
        section = lsp.DidChangeConfigurationRegistrationOptions(section=SECTION)
        registrations.append(lsp.Registration(CONFIGURATION, lsp.WORKSPACE_DID_CHANGE_CONFIGURATION, section))
    if registrations:
        await ls.client_register_capability_async(lsp.RegistrationParams(registrations))
    await _read_configuration(ls, None)


async def did_change_configuration(ls: Server, params: lsp.DidChangeConfigurationParams) -> None:
    """Read the settings again."""
    ls.is_configured.clear()
    await _read_configuration(ls, params.settings)


async def _read_configuration(ls: Server, pushed: object) -> None:
    workspace = ls.client_capabilities.workspace
    if workspace is not None and workspace.configuration:
        item = lsp.ConfigurationItem(section=SECTION)
        answers = await ls.workspace_configuration_async(lsp.ConfigurationParams([item]))
        values: object = answers[0] if answers else None
    else:
        values = pushed.get(SECTION, pushed) if isinstance(pushed, dict) else None
    ls.settings, errors = read_settings(values)
    ls.is_configured.set()
    for message in errors:
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Warning, f"{message}."))
    for uri in ls.documents:
        ls.refresh(uri)


async def did_open(ls: Server, params: lsp.DidOpenTextDocumentParams) -> None:
    """Load the stored runs of the file, look for syntax errors, and prepare the workers of a first run."""
    document = ls.document(params.text_document.uri)
    if document is not None:
        settle_later(ls, document)
        ls.warm_up(document)
        await ls.load_reviews(document)


def did_close(ls: Server, params: lsp.DidCloseTextDocumentParams) -> None:
    """Remove the file's diagnostics and lenses. An active run continues, because its results are stored."""
    ls.refresh(params.text_document.uri)
    # Edits that were not saved are gone.
    ls.refresh_dependents(path_of(params.text_document.uri))


def did_save(ls: Server, params: lsp.DidSaveTextDocumentParams) -> None:
    """Notify the save listeners."""
    document = ls.document(params.text_document.uri)
    if document is not None:
        for listener in ls.save_listeners:
            listener(document)


async def did_change_watched_files(ls: Server, params: lsp.DidChangeWatchedFilesParams) -> None:
    """Reload the runs of open files whose store changed outside the editor."""
    changed = [Path(path_of(change.uri)) for change in params.changes]
    for path in changed:
        ls.refresh_dependents(str(path))
    folders = {Path(os.path.realpath(path.parent.parent)) for path in changed if path.name.startswith(STORE)}
    for document in list(ls.documents.values()):
        root = ls.root_of(document.path) if document.path else None
        if root in folders and not any(job.path == document.path for job in ls.jobs.active):
            await ls.load_reviews(document)


def did_rename(ls: Server, params: lsp.RenameFilesParams) -> None:
    """Move the runs of a renamed file."""
    for item in params.files:
        old, new = path_of(item.old_uri), path_of(item.new_uri)
        if old and new:
            ls.reviews.rename(old, new)


async def shutdown(ls: Server, params: None) -> None:
    """Stop jobs and remove temporary files."""
    await ls.close()


def text(ls: Server, params: Any) -> dict[str, Any] | None:
    """``mtmc/text``: the server's text of a document, so that clients can check synchronisation."""
    document = ls.documents.get(str(getattr(params, "uri", "")))
    return {"text": str(document.text), "version": document.version} if document is not None else None
