"""The server object: what every feature shares, made once and handed to each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams, JsonRpcMethodNotFound
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path

from mtmc_lsp import __version__
from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.results import Verdict
from mtmc_lsp.core.run import RunResult, Step
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.store import STORE
from mtmc_lsp.server.handshake import NAME
from mtmc_lsp.server.jobs import Job, Jobs, JobState
from mtmc_lsp.server.model_consent import ModelConsent
from mtmc_lsp.server.options import SECTION, ClientSettings, Options, read_settings
from mtmc_lsp.server.progress import Reporter
from mtmc_lsp.server.protocol import Protocol
from mtmc_lsp.server.reviews import Review, Reviews, Standing, make_review, steps_from_json, stored_reviews
from mtmc_lsp.server.text import ERRORS, Text
from mtmc_lsp.server.trust import Trust
from mtmc_lsp.source.compose import BEGIN, END
from mtmc_lsp.source.dependencies import Definitions, read_definitions
from mtmc_lsp.source.lint import Context, Finding, check, context_of
from mtmc_lsp.source.outline import Outline, Outliner

log = logging.getLogger(__name__)
CONFIGURATION_SECONDS = 2.0
FOLDER_SECONDS = 30.0
"""How long the settings of a folder are waited for: an editor may first have to find the folder's interpreter."""
RUNS = ("optimize", "resume", "undo", "another")
"""Kinds of jobs that find steps."""
REFRESH_SECONDS = 0.05
"""How long news of runs are gathered before the client is told that there are some."""
GROWING = ("optimize", "resume")
"""Those whose steps can be kept while the search still goes on; the others revise a run, and take its place when done."""


class Document:
    """An open file."""

    def __init__(self, uri: str, language: str, version: int, text: Text) -> None:
        self.uri = uri
        self.path = to_fs_path(uri) or ""
        self.version = version
        self.text = text
        # Notebooks' cells and other languages are no files of ours.
        self.is_python = language == "python" and uri.startswith("file:")
        self._outliner = Outliner(self.path)
        self._outline: Outline | None = None
        self._context: Context | None = None
        self._checked: dict[bytes, tuple[Finding, ...]] = {}
        self.settling: asyncio.TimerHandle | None = None
        """Set while it is waited for that nothing more is typed."""
        self.pushed_at = 0.0
        """When its diagnostics were last pushed, by the loop's clock, and what they were."""
        self.pushed: tuple[int, list[lsp.Diagnostic]] | None = None
        self.on_save: tuple[bytes, tuple[Finding, ...]] = (b"", ())
        """What was found when it was saved, and of which text; offsets are the file's."""

    @property
    def outline(self) -> Outline:
        """What it holds now."""
        if self._outline is None or self._outline.text is not self.text.data:
            change = self.text.take_change()
            edited = self._outliner.edited(self.text.data, change) if change is not None else None
            self._outline = edited or self._outliner.outline(self.text.data, self.text.root)
        return self._outline

    def settle(self) -> bool:
        """Read the whole file where what was typed may mean more than could be seen around it; whether that tells more."""
        before = self.outline
        if self._outliner.is_certain or self.text.root.has_error:
            return False
        self._outline = self._outliner.outline(self.text.data, self.text.root)
        return self._outline.chunks != before.chunks

    def block_at(self, line: int) -> str | None:
        """The target whose generated block is around a 0-based line."""
        data = self.text.data
        at = self.text.offset(lsp.Position(line, 0))
        begin = data.rfind(f"{BEGIN} ".encode(), 0, at + len(self.text.line(line)))
        if begin < 0:
            return None
        name = self.text.line(self.text.position(begin).line)[len(BEGIN) + 1 :].strip()
        end = data.find(END.encode() + b" " + name, begin)
        return name.decode("utf-8", "replace") if end >= 0 and at <= end else None

    @property
    def findings(self) -> list[tuple[int, Finding]]:
        """What the static checks say, with the offset that each counts from: of its statement, or 0."""
        outline = self.outline
        context = context_of(outline)
        if context != self._context:
            self._context, self._checked = context, {}
        known, self._checked = self._checked, {}
        for chunk in outline.chunks:
            self._checked[chunk.text] = known[chunk.text] if chunk.text in known else check(chunk.text, context)
        found = [(chunk.start, finding) for chunk in outline.chunks for finding in self._checked[chunk.text]]
        saved, findings = self.on_save
        return found + [(0, finding) for finding in findings if saved is self.text.data]


class Server(LanguageServer):
    """The language server for one client."""

    protocol: Protocol

    def __init__(self, host_command: Sequence[str]) -> None:
        """Make a server whose jobs run ``host_command``: a process that speaks as ``mtmc_lsp/server/host.py`` does."""
        super().__init__(NAME, __version__, protocol_cls=Protocol)
        self.documents: dict[str, Document] = {}
        self.options = Options()
        self.settings = ClientSettings()
        self.is_configured = asyncio.Event()
        """Whether the client's settings are those that were last asked for."""
        self.trust = Trust(whole_workspace=False)
        self.model_consent = ModelConsent()
        self.reviews = Reviews(find=self._definitions)
        self._on_disk: dict[str, tuple[int, Definitions | None]] = {}
        """Definitions of files that are not open, with the time of their last change in nanoseconds."""
        self._loading: dict[str, asyncio.Event] = {}
        self.jobs = Jobs(host_command, self._on_job)
        self.reporter = Reporter(self)
        self.has_shown: dict[str, str] = {}
        """Documents made for the client to look at, by their URI."""
        self.shown_folder: Path | None = None
        """Where such documents are, for clients that only open files."""
        self.savers: list[Callable[[Document], None]] = []
        """What features do when a file was saved."""
        self.enders: list[Callable[[Job], Coroutine[Any, Any, None]]] = []
        """What features do when a job is over."""
        self.closers: list[Callable[[Server], None]] = []
        """What features do when the client is gone."""
        self.pushing: set[str] = set()
        """Documents whose diagnostics are about to be pushed."""
        self.verdicts: dict[tuple[str, str], tuple[bytes, Verdict]] = {}
        """What verification last said of a target (path and name), and of which text."""
        self.is_alone = True
        """Whether the process serves no other client, and ends with this one."""
        self.refreshers: list[Callable[[set[str]], None]] = []
        """What features do when runs of targets in some documents (their URIs) have news."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stale: set[str] = set()
        """Documents that there are news of."""

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Into the log: an error of ours is no reason to put a window before the user's code."""
        if isinstance(error, (JsonRpcInvalidParams, JsonRpcMethodNotFound)):
            # The client's mistake, and it was answered.
            return
        log.error("%s: %s", getattr(source, "__name__", source), error)
        self.window_log_message(lsp.LogMessageParams(lsp.MessageType.Error, f"mtmc: {type(error).__name__}: {error}"))

    async def close(self) -> None:
        """End what runs (what was found is stored), and remove what was made for the client."""
        await self.jobs.close()
        self.documents.clear()
        for closer in self.closers:
            closer(self)

    # Documents ---------------------------------------------------------------------------------------------------

    def document(self, uri: str) -> Document | None:
        """An open Python file; None for everything else."""
        found = self.documents.get(uri)
        return found if found is not None and found.is_python else None

    def standing(self, document: Document, qualname: str) -> Standing | None:
        """The newest run of a target against the text as it is now."""
        review = self.reviews.get(document.path, qualname)
        return self.reviews.standing(review, document.outline) if review is not None else None

    def standings(self, document: Document) -> list[Standing]:
        """Of every target of the file that has a run."""
        found = [self.reviews.standing(review, document.outline) for review in self.reviews.of(document.path)]
        return [standing for standing in found if standing is not None]

    def _definitions(self, path: str) -> Definitions | None:
        """What a file defines: as the editor holds it, else as it is on disk."""
        for document in self.documents.values():
            if document.path == path and document.is_python:
                return self.reviews.defined(path, document.outline)
        try:
            changed = Path(path).stat().st_mtime_ns
        except OSError:
            return None
        known = self._on_disk.get(path)
        if known is None or known[0] != changed:
            known = self._on_disk[path] = (changed, read_definitions(path))
        return known[1]

    def refresh_dependents(self, path: str) -> None:
        """A file changed: have the client ask anew for open files whose runs depend on it."""
        for document in self.documents.values():
            reviews = self.reviews.of(document.path) if document.path != path else []
            if any(item.path == path for review in reviews for item in review.dependencies):
                self.refresh(document.uri)

    async def configured(self) -> None:
        """Wait for the client's settings; one that never answers gets the defaults."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.is_configured.wait(), CONFIGURATION_SECONDS)

    async def settings_of(self, uri: str) -> ClientSettings:
        """The client's settings for a file: in an editor with several folders each may have its own."""
        workspace = self.client_capabilities.workspace
        if workspace is None or not workspace.configuration:
            await self.configured()
            return self.settings
        asked = lsp.ConfigurationParams([lsp.ConfigurationItem(scope_uri=uri, section=SECTION)])
        try:
            answers = await asyncio.wait_for(self.workspace_configuration_async(asked), FOLDER_SECONDS)
        except asyncio.TimeoutError:
            return self.settings
        # What does not fit was told of when the window's settings were read.
        return read_settings(answers[0] if answers else None)[0]

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something that no answer waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("in the background", exc_info=error)

    async def load_reviews(self, document: Document) -> None:
        """Bring back the runs of a file that was opened."""
        if document.is_python and document.path:
            done = self._loading[document.path] = asyncio.Event()
            try:
                self.reviews.put_all(await asyncio.to_thread(self._stored, document.path))
            finally:
                done.set()
            self.refresh(document.uri)

    async def loaded(self, document: Document) -> None:
        """Wait until the runs of a file that was opened are back."""
        if document.path in self._loading:
            await self._loading[document.path].wait()

    # Runs --------------------------------------------------------------------------------------------------------

    async def _on_job(self, job: Job) -> None:
        if job.kind in RUNS and (job.steps or job.answer):
            self._take(job)
        if job.answer.get("event") == "verified":
            text = str(job.request["text"]).encode("utf-8", ERRORS)
            self.verdicts[job.path, job.target] = (text, from_json(Verdict, job.answer["verdict"]))
        await self.reporter.report(job)
        self.refresh(job.uri)
        if job.is_over:
            for ender in self.enders:
                self.background(ender(job))

    def _take(self, job: Job) -> None:
        """The run as far as it has come, for review."""
        known = self.reviews.get(job.path, job.target)
        if job.answer.get("event") == "result":
            result = from_json(RunResult, job.answer["result"])
            started = time.time() - result.seconds
            self.reviews.put(make_review(result.id, job.path, job.target, started, result.steps, result=result))
        elif job.state is JobState.RUNNING and job.kind in GROWING:
            going = f"job {job.id}"
            done = _still_so(known.steps, job.steps) if known is not None and known.run == going else []
            started = known.started if known is not None and known.run == going else time.time()
            steps = [*done, *steps_from_json(job.steps[len(done) :])]
            self.reviews.put(make_review(going, job.path, job.target, started, steps))
        elif known is not None and known.run == f"job {job.id}":
            # It ended early: what it stored is what there is, and can be gone on with.
            self.background(self._reload(job))

    async def _reload(self, job: Job) -> None:
        for review in await asyncio.to_thread(self._stored, job.path):
            if review.qualname == job.target:
                self.reviews.put(review)
        self.refresh(job.uri)

    def _stored(self, path: str) -> list[Review]:
        folder = self.store_folder(path)
        return stored_reviews(path, folder) if folder is not None else []

    def root_of(self, path: str) -> Path:
        """The project that a file belongs to, where a link leads to it: where its code runs and its store is."""
        return project_root(Path(os.path.realpath(path)))

    def trusts(self, path: str) -> bool:
        """Whether the code of a file's project may be run, and its store opened."""
        return self.trust.has(self.root_of(path), is_linked=self._is_linked(path))

    async def ensure_trust(self, path: str) -> bool:
        """The same, where the user is asked; what the project's store holds is read once they agree."""
        root = self.root_of(path)
        if self.trusts(path):
            return True
        if not await self.trust.ensure(self, root, is_linked=self._is_linked(path)):
            return False
        for document in list(self.documents.values()):
            if document.path and self.root_of(document.path) == root:
                await self.load_reviews(document)
        return True

    def _is_linked(self, path: str) -> bool:
        """Whether a link inside the project leads out of it."""
        opened = os.path.realpath(project_root(Path(path)))
        return Path(opened) not in Path(os.path.realpath(path)).parents

    def store_folder(self, path: str) -> Path | None:
        """The folder of the store of a file's project; ``None`` where there is none, or the project is not trusted."""
        if not path or not self.trusts(path):
            return None
        folder = self.root_of(path) / FOLDER
        # Opening a store creates it, and a project that is only looked at stays as it is.
        return folder if (folder / STORE).exists() else None

    def is_going_on(self, review: Review) -> bool:
        """Whether a job is at work on the run's target."""
        return self.jobs.of(review.path, review.qualname) is not None

    # What the client shows ---------------------------------------------------------------------------------------

    def refresh(self, uri: str) -> None:
        """Have the client ask anew for what depends on runs, as far as it can be asked to; soon, and once for all that is new."""
        if not self._stale:
            asyncio.get_running_loop().call_later(REFRESH_SECONDS, self._refresh)
        self._stale.add(uri)

    def _refresh(self) -> None:
        stale, self._stale = self._stale, set()
        workspace = self.client_capabilities.workspace
        # These are about every open document.
        if workspace is not None and workspace.code_lens is not None and workspace.code_lens.refresh_support:
            self.workspace_code_lens_refresh(None)
        if workspace is not None and workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)
        for refresher in self.refreshers:
            refresher(stale)


def _still_so(steps: Sequence[Step], told: Sequence[dict[str, Any]]) -> list[Step]:
    """The first of a run's steps up to one that was withdrawn since, which do not have to be read again."""
    same = itertools.takewhile(lambda pair: pair[0].status.value == pair[1]["status"], zip(steps, told, strict=False))
    return [step for step, _ in same]
