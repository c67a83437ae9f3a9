"""Runs as the user reviews them: which steps are in the file, which wait for a decision, and whether the code is still the
one that was measured.

What is kept is read off the file's own text, never noted beside it. So undo in the editor, another branch checked out, or a
restart all show what is true.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mtmc_lsp.core.dependencies import Dependency
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.run import KEPT, RunResult, RunStatus, Step, StepStatus
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.search.store import RunRecord, Store
from mtmc_lsp.source.dependencies import Definitions, Finder, changes, definitions_of, read_definitions
from mtmc_lsp.source.outline import Outline, Outlined
from mtmc_lsp.source.target_text import block_start, generated_block, own_text

MOST_CHANGES = 3
"""Changed dependencies that a message lists."""


@dataclass(frozen=True)
class Review:
    """A run of one target."""

    run: str
    path: str
    qualname: str
    status: RunStatus
    environment: Environment | None
    """The machine it was measured on."""
    started: float
    """Seconds since the epoch."""
    steps: tuple[Step, ...]
    result: RunResult | None = None
    own: bytes | None = None
    """The target's own text that was measured; None where the run kept none."""
    recorded_path: str = ""
    """The file's path when it was measured, where it was renamed since."""

    @cached_property
    def dependencies(self) -> tuple[Dependency, ...]:
        """What its versions depend on beside the target's own text."""
        known = (step.candidate.dependencies for step in self.steps if step.candidate is not None)
        items = next((items for items in known if items), ())
        return tuple(replace(i, path=self.path) if i.path and i.path == self.recorded_path else i for i in items)

    @cached_property
    def accepted(self) -> tuple[Step, ...]:
        """The steps to be decided on, in order; none where the run as a whole came to nothing."""
        if self.status not in (*KEPT, RunStatus.RUNNING):
            return ()
        return tuple(s for s in self.steps if s.status is StepStatus.ACCEPTED and s.candidate and s.candidate.code)

    def step(self, index: int) -> Step | None:
        """The accepted step of that number."""
        return next((step for step in self.accepted if step.index == index), None)

    def to_json(self) -> dict[str, Any]:
        """The run as JSON data, for clients that show more than the protocol has words for."""
        steps = [{**to_json(replace(step, candidate=None)), "kernel": _block(step)} for step in self.steps]
        own = {"run": self.run, "path": self.path, "target": self.qualname, "status": self.status.value}
        environment = to_json(self.environment) if self.environment is not None else None
        use = self.result.model_use if self.result is not None else None
        model = use.model if use is not None else ""
        return {**own, "environment": environment, "started": self.started, "model": model, "steps": steps}


def _block(step: Step) -> str:
    return step.candidate.code.block if step.candidate is not None and step.candidate.code is not None else ""


@dataclass(frozen=True)
class Standing:
    """How a run stands against the text as it is now."""

    review: Review
    place: Outlined
    """The target, where it stands now."""
    kept: int
    """How many of the accepted steps the file holds."""
    is_edited: bool
    """Whether the file holds kernels that are no run's that is known here: they were edited, or are older."""
    is_changed: bool
    """Whether the target's own text is no longer the one that was measured."""
    changes: tuple[str, ...] = ()
    """Dependencies that changed since: ``K (line 1) was 3 when this was verified, is 5 now``."""

    @property
    def is_stale(self) -> bool:
        """Whether the run holds no longer for the code as it is now."""
        return self.is_changed or bool(self.changes)

    @property
    def why_stale(self) -> str:
        """What changed, as a clause."""
        if self.is_changed:
            return f"{self.review.qualname} was changed since it was measured"
        more = f", and {len(self.changes) - MOST_CHANGES} more changes" if len(self.changes) > MOST_CHANGES else ""
        return f"{'; '.join(self.changes[:MOST_CHANGES])}{more}"

    @property
    def pending(self) -> tuple[Step, ...]:
        """Steps that wait for the user, in order."""
        return self.review.accepted[self.kept :]

    @property
    def kept_steps(self) -> tuple[Step, ...]:
        """Steps that are in the file."""
        return self.review.accepted[: self.kept]

    @property
    def shown(self) -> Step | None:
        """The last step that is in the file, else the first that waits."""
        steps = self.kept_steps[-1:] or self.pending[:1]
        return steps[0] if steps else None


@dataclass
class Reviews:
    """The newest run of each target that is open in the editor."""

    _found: dict[tuple[str, str], Review] = field(default_factory=dict)
    _blocks: set[str] = field(default_factory=set)
    """Kernels of every run that was seen here, superseded ones too."""
    _texts: dict[tuple[str, bytes], tuple[bytes | None, str | None]] = field(default_factory=dict)
    """Own text and block of a target, by its name and the part of the file that they are read from."""
    find: Finder = read_definitions
    """Gives the definitions of other files than the target's."""
    _definitions: dict[str, tuple[Outline, Definitions]] = field(default_factory=dict)
    """Of the files that were looked at last, by path."""

    def put(self, review: Review) -> None:
        """A run that goes on, or is over."""
        self._found[review.path, review.qualname] = review
        self._blocks.update(_block(step).rstrip("\n") for step in review.accepted)

    def get(self, path: str, qualname: str) -> Review | None:
        """The newest run of a target."""
        return self._found.get((path, qualname))

    def of(self, path: str) -> list[Review]:
        """The newest run of each target in a file."""
        return [review for (where, _), review in self._found.items() if where == path]

    def moved(self, old: str, new: str) -> None:
        """The file was renamed."""
        for key in [key for key in self._found if key[0] == old]:
            review = self._found.pop(key)
            self.put(replace(review, path=new, recorded_path=review.recorded_path or old))

    def put_all(self, reviews: Iterable[Review]) -> None:
        """What the store holds of a file; runs that are newer here stay."""
        for review in reviews:
            known = self._found.get((review.path, review.qualname))
            if known is None or known.started < review.started or known.run == review.run:
                self.put(review)

    def standing(self, review: Review, outline: Outline) -> Standing | None:
        """How a run stands; None where the target is gone from the file."""
        found = outline.find(review.qualname)
        if found is None:
            return None
        text = outline.text
        chunk_end = found.chunk.start + len(found.chunk.text)
        start = block_start(text, review.qualname)
        part = text[start if 0 <= start < found.chunk.start else found.chunk.start : chunk_end]
        own, block = self._read(review.qualname, part)
        kept = _kept(review.accepted, block)
        is_edited = block is not None and not kept and block.rstrip("\n") not in self._blocks
        is_changed = review.own is not None and own != review.own
        return Standing(review, found, kept, is_edited, is_changed, self._changes(review, outline))

    def _changes(self, review: Review, outline: Outline) -> tuple[str, ...]:
        if not review.dependencies:
            return ()

        def find(path: str) -> Definitions | None:
            return self.defined(path, outline) if path == review.path else self.find(path)

        return changes(review.dependencies, review.path, find)

    def defined(self, path: str, outline: Outline) -> Definitions:
        """The definitions of an open file."""
        known = self._definitions.get(path)
        if known is None or known[0] is not outline:
            known = self._definitions[path] = (outline, definitions_of(outline.chunks))
        return known[1]

    def _read(self, qualname: str, part: bytes) -> tuple[bytes | None, str | None]:
        key = (qualname, part)
        if key not in self._texts:
            if len(self._texts) > 200:
                self._texts.clear()
            self._texts[key] = (own_text(part, qualname), generated_block(part, qualname))
        return self._texts[key]


def _kept(accepted: Sequence[Step], block: str | None) -> int:
    if block is None:
        return 0
    return max((n for n, step in enumerate(accepted, 1) if _block(step).rstrip("\n") == block.rstrip("\n")), default=0)


def make_review(
    run: str,
    path: str,
    qualname: str,
    started: float,
    steps: Sequence[Step],
    *,
    result: RunResult | None = None,
    environment: Environment | None = None,
    text: bytes | None = None,
) -> Review:
    """A run from its parts; ``text`` is the file it began with, where it is known otherwise than by its steps."""
    sources = [step.candidate.source for step in steps if step.candidate is not None]
    source = text or (sources[0].encode("utf-8", "surrogatepass") if sources else None)
    if source is None and result is not None:
        source = result.final.source.encode("utf-8", "surrogatepass")
    status = result.status if result is not None else RunStatus.RUNNING
    environment = result.environment if result is not None else environment
    own = own_text(source, qualname) if source is not None else None
    return Review(run, path, qualname, status, environment, started, tuple(steps), result, own)


def steps_from_json(data: Iterable[dict[str, Any]]) -> list[Step]:
    """Steps as a host tells them."""
    return [from_json(Step, item) for item in data]


def stored_reviews(path: str, folder: Path) -> list[Review]:
    """The newest run of each target of a file, from the store in ``folder``; none where it is damaged."""
    found: list[Review] = []
    try:
        with Store(folder) as store:
            newest: dict[str, RunRecord] = {}
            for record in store.runs():
                if record.path == path:
                    newest.setdefault(record.qualname, record)
            for record in newest.values():
                result = store.result(record.id)
                steps = result.steps if result is not None else store.steps(record.id)
                found.append(
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
    except (MtmcError, TypeError, ValueError, json.JSONDecodeError):
        # A store of another version: the editor goes on without it, and the next run says what is wrong.
        return []
    return found
