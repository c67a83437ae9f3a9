"""Review state of runs: which steps the file contains, which are pending, and whether the code changed since the measurement.

Kept steps are detected from the text of the file and never stored separately. So the state is correct after undo in the editor,
after checking out another branch, and after a restart.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mtmc_lsp.app.revisions.rebase import contains, rebase
from mtmc_lsp.core.dependencies import Dependency
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import KEPT, RunResult, RunStatus, Step, StepStatus, original_text, parents
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.search.store import RunRecord, Store
from mtmc_lsp.source.blocks import block_code, find_block
from mtmc_lsp.source.chunks import Chunk
from mtmc_lsp.source.compose import own_dispatches
from mtmc_lsp.source.dependencies import Definitions, Finder, changes, definitions_of, read_definitions
from mtmc_lsp.source.dispatch.marks import generated_part
from mtmc_lsp.source.outline import Outline, OutlineEntry
from mtmc_lsp.source.sibling.pair import block_of
from mtmc_lsp.source.sibling.statement import find_kernel_import
from mtmc_lsp.source.target_text import target_source

MAX_CHANGES = 3
"""Maximum number of changed dependencies in a message."""


@dataclass(frozen=True)
class Review:
    """A run of one target."""

    run: str
    path: str
    qualname: str
    status: RunStatus
    environment: Environment | None
    """The environment of the measurement."""
    started: float
    """Seconds since the epoch."""
    steps: tuple[Step, ...]
    result: RunResult | None = None
    measured_text: bytes | None = None
    """Original text of the target at the measurement; None if the run did not store it."""
    recorded_path: str = ""
    """Path of the file at the measurement, if the file was renamed since."""

    @cached_property
    def dependencies(self) -> tuple[Dependency, ...]:
        """Dependencies of the versions besides the original text of the target."""
        recorded = (step.candidate.dependencies for step in self.steps if step.candidate is not None)
        items = next((items for items in recorded if items), ())
        return tuple(
            replace(item, path=self.path) if item.path and item.path == self.recorded_path else item for item in items
        )

    @cached_property
    def accepted(self) -> tuple[Step, ...]:
        """The accepted steps in order; empty if the run as a whole was not successful."""
        if self.status not in (*KEPT, RunStatus.RUNNING):
            return ()
        return tuple(
            s
            for s in self.steps
            if s.status is StepStatus.ACCEPTED and s.candidate and (s.candidate.code or original_text(s) is not None)
        )

    @cached_property
    def original(self) -> str | None:
        """The file before a run that edits its kernels; None for a run with generated code."""
        return next((text for step in self.steps if (text := original_text(step)) is not None), None)

    def version(self, count: int) -> str:
        """The file with the first edits of a run that edits kernels."""
        candidate = self.accepted[count - 1].candidate if count else None
        return candidate.source if candidate is not None else self.original or ""

    def step(self, index: int) -> Step | None:
        """The accepted step with this number."""
        return next((step for step in self.accepted if step.index == index), None)

    def to_json(self) -> dict[str, Any]:
        """The run as JSON data, for clients with their own review user interface."""
        known = parents(self.steps)
        steps = [
            {**to_json(replace(step, candidate=None)), "kernel": _block(step), "parent": known[step.index]}
            for step in self.steps
        ]
        header = {"run": self.run, "path": self.path, "target": self.qualname, "status": self.status.value}
        environment = to_json(self.environment) if self.environment is not None else None
        model_use = self.result.model_use if self.result is not None else None
        model = model_use.model if model_use is not None else ""
        return {**header, "environment": environment, "started": self.started, "model": model, "steps": steps}


def _block(step: Step) -> str:
    return step.candidate.code.block if step.candidate is not None and step.candidate.code is not None else ""


@dataclass(frozen=True)
class ReviewState:
    """The state of a run compared with the current text."""

    review: Review
    outlined: OutlineEntry
    """The target in the current text."""
    kept_count: int
    """Number of accepted steps that the file contains."""
    is_edited: bool
    """Whether the file contains kernels of no known run: they were edited or are older."""
    is_changed: bool
    """Whether the original text of the target changed since the measurement."""
    changes: tuple[str, ...] = ()
    """Dependencies that changed since the verification: ``K (line 1) was 3 when this was verified, is 5 now``."""
    selected_index: int | None = None
    """Number of the step that the user selected."""

    @property
    def selected(self) -> Step | None:
        """The pending step to show: the user's selection, else the first one."""
        chosen = (step for step in self.pending if step.index == self.selected_index)
        return next(chosen, self.pending[0] if self.pending else None)

    @property
    def is_stale(self) -> bool:
        """Whether the results of the run do not apply to the current code."""
        return self.is_changed or bool(self.changes)

    @property
    def stale_description(self) -> str:
        """Description of the change, as a clause."""
        if self.is_changed:
            return f"{self.review.qualname} changed since it was measured"
        more = f", and {len(self.changes) - MAX_CHANGES} more changes" if len(self.changes) > MAX_CHANGES else ""
        return f"{'; '.join(self.changes[:MAX_CHANGES])}{more}"

    @property
    def pending(self) -> tuple[Step, ...]:
        """Pending steps, in order."""
        return self.review.accepted[self.kept_count :]

    @property
    def kept_steps(self) -> tuple[Step, ...]:
        """Steps that the file contains."""
        return self.review.accepted[: self.kept_count]

    @property
    def shown(self) -> Step | None:
        """The last kept step, else the first pending one."""
        steps = self.kept_steps[-1:] or self.pending[:1]
        return steps[0] if steps else None


@dataclass
class Reviews:
    """The newest run of each target in open files."""

    _newest: dict[tuple[str, str], Review] = field(default_factory=dict)
    _blocks: set[str] = field(default_factory=set)
    """Generated blocks of all known runs, including superseded ones."""
    _texts: dict[tuple[str, bytes], tuple[bytes | None, str | None]] = field(default_factory=dict)
    """Cache: original text and generated block by target name and source part."""
    find: Finder = read_definitions
    """Returns the definitions of files other than the target's file."""
    _selected: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    """Run and number of the selected step, by path and target."""
    _definitions: dict[str, tuple[Outline, Definitions]] = field(default_factory=dict)
    """Cached definitions of open files, by path."""
    _earlier: dict[tuple[str, str], list[Review]] = field(default_factory=dict)
    """Runs that were replaced because a step was taken out, newest first: undo in the editor brings their text back."""
    _reviewed: set[tuple[str, str, str]] = field(default_factory=set)
    """Path, target and hash of each change that the user marked as reviewed."""

    def put(self, review: Review) -> None:
        """Add or update an active or finished run."""
        self._newest[review.path, review.qualname] = review
        self._blocks.update(_block(step).rstrip("\n") for step in review.accepted)

    def put_earlier(self, review: Review) -> None:
        """Remember a run that was replaced because a kept step was taken out, or its result."""
        runs = self._earlier.setdefault((review.path, review.qualname), [])
        runs[:] = [review, *(run for run in runs if run.run != review.run)]

    def has_earlier(self, path: str, qualname: str, run: str) -> bool:
        """Whether a run was replaced because a kept step was taken out."""
        return any(review.run == run for review in self._earlier.get((path, qualname), ()))

    def forget_earlier(self, path: str, qualname: str) -> None:
        """A new search replaces all runs of a target."""
        self._earlier.pop((path, qualname), None)

    def follow(self, path: str, outline: Outline, kernels: bytes | None) -> list[Review]:
        """Return to the earlier runs whose steps the file contains after an edit, and not those of the newest run.

        Returns:
            The runs that are the newest now.
        """
        returned = []
        for review in [review for review in self.of(path) if self._earlier.get((path, review.qualname))]:
            runs = self._earlier[path, review.qualname]
            states = [self.review_state(item, outline, kernels) for item in (review, *runs)]
            match = next((state for state in states if state is not None and state.kept_count), None)
            if match is not None and match.review is not review:
                runs.remove(match.review)
                runs.insert(0, review)
                newest = replace(match.review, started=time.time())
                self.put(newest)
                returned.append(newest)
        return returned

    def get(self, path: str, qualname: str) -> Review | None:
        """The newest run of a target."""
        return self._newest.get((path, qualname))

    def of(self, path: str) -> list[Review]:
        """The newest run of each target in a file."""
        return [review for (review_path, _), review in self._newest.items() if review_path == path]

    def rename(self, old: str, new: str) -> None:
        """Update the runs of a renamed file."""
        for key in [key for key in self._newest if key[0] == old]:
            review = self._newest.pop(key)
            self.put(replace(review, path=new, recorded_path=review.recorded_path or old))

    def put_all(self, reviews: Iterable[Review]) -> None:
        """Add stored runs of a file, without replacing newer runs."""
        for review in reviews:
            current = self._newest.get((review.path, review.qualname))
            if current is None or current.started < review.started or current.run == review.run:
                self.put(review)

    def review_state(self, review: Review, outline: Outline, kernels: bytes | None = None) -> ReviewState | None:
        """The state of a run; None if the file no longer contains the target.

        Args:
            kernels: the file of kernels that the file imports, if any.
        """
        outlined = outline.find(review.qualname)
        if outlined is None:
            return None
        if review.original is not None:
            return self._edit_state(review, outlined, outline.text.decode("utf-8", "surrogatepass"))
        part = _with_block(review.qualname, outlined.chunk, outline.text, kernels)
        original, block = self._read(review.qualname, part)
        kept_count = _kept_count(review.accepted, block)
        is_edited = block is not None and not kept_count and block.rstrip("\n") not in self._blocks
        is_changed = review.measured_text is not None and original != review.measured_text
        run, index = self._selected.get((review.path, review.qualname), ("", 0))
        selected = index if run == review.run else None
        changes = self._changes(review, outline)
        return ReviewState(review, outlined, kept_count, is_edited, is_changed, changes, selected)

    def _edit_state(self, review: Review, outlined: OutlineEntry, text: str) -> ReviewState:
        """The state of a run that edits kernels: the edits that could be taken out of the text are in it."""
        original, count = review.version(0), len(review.accepted)
        kept = next((n for n in range(count, 0, -1) if contains(original, review.version(n), text)), 0)
        is_changed = not kept and bool(count) and rebase(original, review.version(count), text) is None
        run, index = self._selected.get((review.path, review.qualname), ("", 0))
        return ReviewState(review, outlined, kept, False, is_changed, (), index if run == review.run else None)

    def select(self, review: Review, index: int) -> None:
        """Select the step that is shown of a run."""
        self._selected[review.path, review.qualname] = (review.run, index)

    def is_reviewed(self, review: Review, step: Step) -> bool:
        """Whether the user marked a step as reviewed. The mark is for the lines that it adds."""
        return (review.path, review.qualname, change_of(step)) in self._reviewed

    def mark(self, review: Review, step: Step, *, is_reviewed: bool) -> None:
        """Mark a step as reviewed, or not."""
        mark = (review.path, review.qualname, change_of(step))
        (self._reviewed.add if is_reviewed else self._reviewed.discard)(mark)

    def put_reviewed(self, path: str, changes: Iterable[tuple[str, str]]) -> None:
        """The stored marks of a file: the target and the hash of each change."""
        others = {mark for mark in self._reviewed if mark[0] != path}
        self._reviewed = others | {(path, *change) for change in changes}

    def _changes(self, review: Review, outline: Outline) -> tuple[str, ...]:
        if not review.dependencies:
            return ()

        def find(path: str) -> Definitions | None:
            return self.open_definitions(path, outline) if path == review.path else self.find(path)

        return changes(review.dependencies, review.path, find)

    def open_definitions(self, path: str, outline: Outline) -> Definitions:
        """The definitions of an open file."""
        cached = self._definitions.get(path)
        if cached is None or cached[0] is not outline:
            cached = self._definitions[path] = (outline, definitions_of(outline.chunks))
        return cached[1]

    def _read(self, qualname: str, part: bytes) -> tuple[bytes | None, str | None]:
        key = (qualname, part)
        if key not in self._texts:
            if len(self._texts) > 200:
                self._texts.clear()
            # Without its block, an import of kernels stands for kernels that are no longer there.
            is_missing = find_kernel_import(part) is not None
            self._texts[key] = (target_source(part, qualname), "" if is_missing else block_code(part, qualname))
        return self._texts[key]


def _with_block(qualname: str, chunk: Chunk, text: bytes, kernels: bytes | None) -> bytes:
    """A target's top-level statement, below its generated block if there is one, or the import of a block that is missing."""
    span, chunk_end = find_block(text, qualname), chunk.start + len(chunk.text)
    if span is None:
        present = find_kernel_import(text)
        marks = own_dispatches(chunk.text, qualname) if present is not None else []
        if present is None or not any(present.names_in(generated_part(chunk.text, mark)) for mark in marks):
            return chunk.text
        found = block_of(kernels, qualname) if kernels is not None else None
        if kernels is None or found is None:
            return text[present.start : present.end] + chunk.text
        return kernels[found[1].start : found[1].end].rstrip() + b"\n" + chunk.text
    if span.start < chunk.start < span.end:
        # Without an empty line between them, the last line of the block is a comment of the statement.
        return text[span.start : chunk_end]
    return text[span.start : span.end].rstrip() + b"\n" + chunk.text


def _kept_count(accepted: Sequence[Step], block: str | None) -> int:
    if block is None:
        return 0
    return max((n for n, step in enumerate(accepted, 1) if _block(step).rstrip("\n") == block.rstrip("\n")), default=0)


def change_of(step: Step) -> str:
    """A hash of the lines that a step adds, wherever they are: it stays the same while an earlier step is taken out."""
    added = [line for line in step.diff.split("\n") if line.startswith("+") and not line.startswith("+++ ")]
    return hashlib.sha256("\n".join(added).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def make_review(
    run: str,
    path: str,
    qualname: str,
    started: float,
    steps: Sequence[Step],
    *,
    result: RunResult | None = None,
    environment: Environment | None = None,
) -> Review:
    """Build a review."""
    sources = [step.candidate.source for step in steps if step.candidate is not None]
    source = sources[0] if sources else result.final.source if result is not None else None
    status = result.status if result is not None else RunStatus.RUNNING
    environment = result.environment if result is not None else environment
    measured_text = target_source(source.encode("utf-8", "surrogatepass"), qualname) if source is not None else None
    return Review(run, path, qualname, status, environment, started, tuple(steps), result, measured_text)


def stored_reviews(path: str, store: Store) -> list[Review]:
    """The newest run of each target of a file. An evolution is one after its end: it may go on for days."""
    reviews: list[Review] = []
    newest: dict[str, RunRecord] = {}
    evolutions = store.evolutions()
    for record in store.runs():
        is_evolving = record.status is RunStatus.RUNNING and record.id in evolutions
        if record.path == path and not is_evolving:
            newest.setdefault(record.qualname, record)
    for record in newest.values():
        result = store.result(record.id)
        steps = result.steps if result is not None else store.steps(record.id)
        reviews.append(
            make_review(
                record.id,
                path,
                record.qualname,
                record.started,
                steps,
                result=result,
                environment=record.environment,
            )
        )
    return reviews
