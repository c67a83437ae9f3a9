"""The server object with the state that all features share."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams, JsonRpcMethodNotFound
from pygls.lsp.server import LanguageServer

from mtmc_lsp import __version__
from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.errors import MtmcError, RequestError
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.results import Verdict
from mtmc_lsp.core.run import RunResult, Step
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.store import STORE, Store
from mtmc_lsp.server.failures.failure import Failure
from mtmc_lsp.server.handshake import NAME
from mtmc_lsp.server.jobs import Job, Jobs, JobState
from mtmc_lsp.server.kernels_file.texts import imported_kernels
from mtmc_lsp.server.model_consent import ModelConsent
from mtmc_lsp.server.options import SECTION, ClientSettings, Options, read_settings
from mtmc_lsp.server.progress import Lenses, Reporter
from mtmc_lsp.server.protocol import Protocol
from mtmc_lsp.server.reviews import Review, Reviews, ReviewState, make_review, stored_reviews
from mtmc_lsp.server.text import ERRORS, Document
from mtmc_lsp.server.trust import Trust
from mtmc_lsp.server.warm_workers import WarmWorkers
from mtmc_lsp.source.dependencies import Definitions, read_definitions
from mtmc_lsp.source.sibling.pair import kernels_path

T = TypeVar("T")
log = logging.getLogger(__name__)
CONFIGURATION_SECONDS = 2.0
FOLDER_SECONDS = 30.0
"""Timeout for the settings of a folder: the editor may first have to find the folder's interpreter."""
REPAIR = "repair"
"""Kind of the job that detects and repairs faults of kernels."""
CERTIFY = "certify"
"""Kind of the job that verifies steps which were written again after another step was removed."""
KEEP_VERSION = "keepVersion"
"""Kind of the job that verifies a version of an evolution as a run."""
RUN_JOBS = ("optimize", "resume", "undo", "another", CERTIFY, KEEP_VERSION)
"""Kinds of jobs that produce steps."""
STORE_SECONDS = 5.0
"""How long the server waits for a store that another process has locked, and for one query."""
REFRESH_SECONDS = 0.05
"""Minimum time between two refreshes: the first change is shown at once, the next ones are combined."""
INCREMENTAL_JOBS = ("optimize", "resume")
"""Kinds of jobs whose steps can be kept while the search is running. The others replace a run when they finish."""


class Server(LanguageServer):
    """The language server for one client."""

    protocol: Protocol

    def __init__(self, host_command: Sequence[str]) -> None:
        """Create a server whose jobs run ``host_command``, a process with the protocol of ``mtmc_lsp/server/host.py``."""
        super().__init__(NAME, __version__, protocol_cls=Protocol)
        self.documents: dict[str, Document] = {}
        self.options = Options()
        self.settings = ClientSettings()
        self.is_configured = asyncio.Event()
        """Set when the client's current settings are loaded."""
        self.trust = Trust(whole_workspace=False)
        self.model_consent = ModelConsent()
        self.reviews = Reviews(find=self._definitions)
        self._on_disk: dict[str, tuple[int, Definitions | None]] = {}
        """Definitions of files that are not open, with the time of their last change in nanoseconds."""
        self._loading: dict[str, asyncio.Event] = {}
        self.warm_workers = WarmWorkers()
        self.warms = False
        """Whether opening a trusted file prepares the workers of its first run."""
        self.jobs = Jobs(host_command, self._on_job, self.warm_workers.lend)
        self.reporter = Reporter(self)
        self.lenses = Lenses(self)
        self.shown_documents: dict[str, str] = {}
        """Generated read-only documents by URI."""
        self.shown_folder: Path | None = None
        """Temporary folder with these documents, for clients that can only open files."""
        self.save_listeners: list[Callable[[Document], None]] = []
        """Called after a file was saved."""
        self.job_end_listeners: list[Callable[[Job], Coroutine[Any, Any, None]]] = []
        """Called when a job has ended."""
        self.job_listeners: list[Callable[[Job], None]] = []
        """Called when the state of a job changed, before it is reported."""
        self.change_listeners: list[Callable[[Document], None]] = []
        """Called after a file was edited."""
        self.failures: dict[tuple[str, str], Failure] = {}
        """Last failure of each target (path, name)."""
        self.close_listeners: list[Callable[[Server], None]] = []
        """Called when the client has disconnected."""
        self.pushing: set[str] = set()
        """URIs of documents whose diagnostics are about to be pushed."""
        self.verdicts: dict[tuple[str, str], tuple[bytes, Verdict]] = {}
        """Last verification of each target (path, name): the verified text and the verdict."""
        self.client_watcher: Callable[[int], None] = lambda process: None
        """Ends the server when the client's process, given by its id, is gone."""
        self.is_alone = True
        """Whether the process serves only this client and exits with it."""
        self.refresh_listeners: list[Callable[[set[str]], None]] = []
        """Called with the URIs of documents whose runs changed."""
        self._last_error = ""
        self._store_lock = asyncio.Lock()
        self._is_prepared = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stale: set[str] = set()
        """URIs of documents whose runs changed since the last refresh."""
        self._refreshed_at = 0.0
        """When the client was asked to refresh last, in event loop time."""

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Log internal errors instead of showing a message box."""
        if isinstance(error, (JsonRpcInvalidParams, JsonRpcMethodNotFound)):
            # A client error that was already answered.
            return
        log.error("%s: %s", getattr(source, "__name__", source), error)
        self.window_log_message(lsp.LogMessageParams(lsp.MessageType.Error, f"mtmc: {type(error).__name__}: {error}"))

    async def close(self) -> None:
        """Stop jobs (their results are stored), and remove temporary files."""
        self.lenses.close()
        await self.jobs.close()
        await asyncio.to_thread(self.warm_workers.close)
        self.documents.clear()
        for closer in self.close_listeners:
            closer(self)

    def show_error(self, error: MtmcError) -> None:
        """Show an error to the user, unless it was the last one."""
        if str(error) != self._last_error:
            self._last_error = str(error)
            self.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, str(error)))

    # Documents ---------------------------------------------------------------------------------------------------

    def document(self, uri: str) -> Document | None:
        """An open Python file; None for any other URI."""
        document = self.documents.get(uri)
        return document if document is not None and document.is_python else None

    def review_state(self, document: Document, qualname: str) -> ReviewState | None:
        """The newest run of a target, compared with the current text."""
        review = self.reviews.get(document.path, qualname)
        kernels = imported_kernels(self, document)
        return self.reviews.review_state(review, document.outline, kernels) if review is not None else None

    def review_states(self, document: Document) -> list[ReviewState]:
        """The runs of all targets of the file, compared with the current text."""
        reviews, kernels = self.reviews.of(document.path), imported_kernels(self, document)
        states = [self.reviews.review_state(review, document.outline, kernels) for review in reviews]
        return [review_state for review_state in states if review_state is not None]

    def _definitions(self, path: str) -> Definitions | None:
        """What a file defines: as the editor holds it, else as it is on disk."""
        for document in self.documents.values():
            if document.path == path and document.is_python:
                return self.reviews.open_definitions(path, document.outline)
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
            if (reviews and kernels_path(Path(document.path)) == Path(path)) or any(
                item.path == path for review in reviews for item in review.dependencies
            ):
                self.refresh(document.uri)

    async def configured(self) -> None:
        """Wait for the client's settings; after a timeout the defaults apply."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.is_configured.wait(), CONFIGURATION_SECONDS)

    async def settings_of(self, uri: str) -> ClientSettings:
        """The client's settings for a file; each folder of a workspace may have different settings."""
        workspace = self.client_capabilities.workspace
        if workspace is None or not workspace.configuration:
            await self.configured()
            return self.settings
        request = lsp.ConfigurationParams([lsp.ConfigurationItem(scope_uri=uri, section=SECTION)])
        try:
            answers = await asyncio.wait_for(self.workspace_configuration_async(request), FOLDER_SECONDS)
        except asyncio.TimeoutError:
            return self.settings
        # Invalid values were reported when the window's settings were read.
        return read_settings(answers[0] if answers else None)[0]

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed", exc_info=error)

    async def load_reviews(self, document: Document) -> None:
        """Load the stored runs of an opened file."""
        if document.is_python and document.path:
            done = self._loading[document.path] = asyncio.Event()
            try:
                self.reviews.put_all(await self._stored(document.path))
                if self.reviews.of(document.path):
                    self.prepare_removal()
            finally:
                done.set()
            self.refresh(document.uri)

    def prepare_removal(self) -> None:
        """Import what taking a step out needs, in the background and once: the first time should not take longer."""
        if not self._is_prepared:
            self._is_prepared = True
            self.background(asyncio.to_thread(importlib.import_module, "mtmc_lsp.app.revisions.recompose"))

    async def loaded(self, document: Document) -> None:
        """Wait until the stored runs of an opened file are loaded, and the stored part of a run that was stopped."""
        if document.path in self._loading:
            await self._loading[document.path].wait()

    # Runs --------------------------------------------------------------------------------------------------------

    async def _on_job(self, job: Job) -> None:
        if job.kind in RUN_JOBS and (job.steps or job.answer or job.is_over):
            self._update_review(job)
        if job.answer.get("event") == "verified":
            text = str(job.request["text"]).encode("utf-8", ERRORS)
            self.verdicts[job.path, job.target] = (text, from_json(Verdict, job.answer["verdict"]))
        for listener in self.job_listeners:
            listener(job)
        await self.reporter.report(job)
        self.refresh(job.uri)
        if job.is_over:
            for ender in self.job_end_listeners:
                self.background(ender(job))

    def _update_review(self, job: Job) -> None:
        """Update the review with the current state of the job's run."""
        previous = self.reviews.get(job.path, job.target)
        if job.answer.get("event") == "result":
            result = from_json(RunResult, job.answer["result"])
            started = time.time() - result.seconds
            review = make_review(result.id, job.path, job.target, started, result.steps, result=result)
            if job.kind == CERTIFY and previous is not None and previous.run != result.id:
                # Another step was removed meanwhile, and its run is verified next; or undo in the editor returned to another run.
                if self.reviews.has_earlier(job.path, job.target, result.id):
                    self.reviews.put_earlier(review)
                return
            self.prepare_removal()
            self.reviews.put(review)
        elif job.state is JobState.RUNNING and job.kind in INCREMENTAL_JOBS:
            run_name = f"job {job.id}"
            self.reviews.forget_earlier(job.path, job.target)
            unchanged_steps = (
                _unchanged_steps(previous.steps, job.steps) if previous is not None and previous.run == run_name else []
            )
            started = previous.started if previous is not None and previous.run == run_name else time.time()
            steps = [*unchanged_steps, *(from_json(Step, item) for item in job.steps[len(unchanged_steps) :])]
            self.reviews.put(make_review(run_name, job.path, job.target, started, steps))
        elif previous is not None and (previous.run == f"job {job.id}" or (job.is_over and job.kind == CERTIFY)):
            # The job was stopped: load the stored part of the run, which can be resumed. Commands wait until then: the
            # review still has the name of the job, which is not in the store.
            done = self._loading[job.path] = asyncio.Event()
            self.background(self._reload(job, done))

    async def _reload(self, job: Job, done: asyncio.Event) -> None:
        try:
            for review in await self._stored(job.path):
                if review.qualname == job.target:
                    self.reviews.put(review)
        finally:
            done.set()
        self.refresh(job.uri)

    async def _stored(self, path: str) -> list[Review]:
        stored = await self.read_store(path, lambda store: (stored_reviews(path, store), store.reviewed(path)))
        if stored is None:
            return []
        self.reviews.put_reviewed(path, stored[1])
        return stored[0]

    async def read_store(self, path: str, read: Callable[[Store], T]) -> T | None:
        """Read the store of a file's project in a thread. None if there is none, or if it cannot be read, which is reported."""
        # One after the other: a damaged store is set aside only once.
        async with self._store_lock:
            try:
                return await asyncio.to_thread(self._read_store, path, read)
            except RequestError:
                # An active run is not stored under its name yet.
                return None
            except MtmcError as error:
                self.show_error(error)
                return None

    def _read_store(self, path: str, read: Callable[[Store], T]) -> T | None:
        folder = self.store_folder(path)
        if folder is None:
            return None
        with Store(folder, wait_seconds=STORE_SECONDS) as store:
            return read(store)

    def root_of(self, path: str) -> Path:
        """The project folder of a file, with links resolved. The file's code runs there, and the store is there."""
        return project_root(Path(os.path.realpath(path)))

    def trusts(self, path: str) -> bool:
        """Whether the file's project is trusted: its code may run and its store may be opened."""
        return self.trust.has(self.root_of(path), is_linked=self._is_linked(path))

    async def ensure_trust(self, path: str) -> bool:
        """Like ``trusts``, but asks the user if necessary, and loads the stored runs once the user agrees."""
        root = self.root_of(path)
        if self.trusts(path):
            return True
        if not await self.trust.ensure(self, root, is_linked=self._is_linked(path)):
            return False
        for document in list(self.documents.values()):
            if document.path and self.root_of(document.path) == root:
                await self.load_reviews(document)
                self.warm_up(document)
        return True

    def warm_up(self, document: Document) -> None:
        """Prepare the workers of the first run, if the file is trusted and uses torch."""
        if self.warms and document.path and document.uses_tensors and self.trusts(document.path):
            self.background(self._warm_up(document.uri, document.path))

    async def _warm_up(self, uri: str, path: str) -> None:
        python = (await self.settings_of(uri)).python
        await asyncio.to_thread(self.warm_workers.prepare, path, python)

    def _is_linked(self, path: str) -> bool:
        """Whether the path leaves its project through a link."""
        opened_root = os.path.realpath(project_root(Path(path)))
        return Path(opened_root) not in Path(os.path.realpath(path)).parents

    def store_folder(self, path: str) -> Path | None:
        """The store folder of a file's project; ``None`` if it does not exist or the project is not trusted."""
        if not path or not self.trusts(path):
            return None
        folder = self.root_of(path) / FOLDER
        # Opening a store would create it: do not modify projects that were only opened.
        return folder if os.path.exists(folder / STORE) else None

    def is_active(self, review: Review) -> bool:
        """Whether a job for the run's target is queued or running. Steps can be removed while others are verified."""
        job = self.jobs.for_target(review.path, review.qualname)
        return job is not None and job.kind != CERTIFY

    # What the client shows ---------------------------------------------------------------------------------------

    def refresh(self, uri: str) -> None:
        """Ask the client to refresh everything that depends on runs. Several calls in a short time are combined."""
        if not self._stale:
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time(), self._refreshed_at + REFRESH_SECONDS), self._refresh)
        self._stale.add(uri)

    def _refresh(self) -> None:
        stale, self._stale = self._stale, set()
        self._refreshed_at = asyncio.get_running_loop().time()
        # These requests refresh all open documents.
        self.lenses.refresh()
        workspace = self.client_capabilities.workspace
        if workspace is not None and workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)
        for refresher in self.refresh_listeners:
            refresher(stale)


def _unchanged_steps(steps: Sequence[Step], current: Sequence[dict[str, Any]]) -> list[Step]:
    """The leading steps whose status did not change; they do not have to be parsed again."""
    unchanged = itertools.takewhile(
        lambda pair: pair[0].status.value == pair[1]["status"], zip(steps, current, strict=False)
    )
    return [step for step, _ in unchanged]
