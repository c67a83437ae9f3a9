"""A stored run with its steps, its exchanges with a model and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.core.chat import Exchange
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.run import RunResult, Step
from mtmc_lsp.search.store import RunRecord, Store


@dataclass(frozen=True)
class StoredRun:
    """Everything that the store contains about a run."""

    record: RunRecord
    steps: Sequence[Step]
    exchanges: Sequence[Exchange]
    result: RunResult | None
    """``None`` if the run is not finished."""
    is_evolution: bool = False
    """Whether the run evolves versions."""

    @property
    def resume_command(self) -> str:
        """The command that continues the run."""
        return f"mtmc {'evolve' if self.is_evolution else 'optimize'} --resume {self.record.id}"


def stored_run(store: Store, name: str = "") -> StoredRun:
    """The run whose id is or begins with ``name``; by default the newest.

    Raises:
        RequestError: there is no such run, or several ids begin with ``name``.
    """
    matching = [record for record in store.runs() if record.id.startswith(name)]
    if not matching or (name and len(matching) > 1):
        which = f"run {name!r}" if name else "run"
        problem = f"there is no {which}" if not matching else f"several runs begin with {name!r}"
        raise RequestError(problem, where=Location(str(store.folder)), remedy="See `mtmc runs`.")
    record = matching[0]
    result = store.result(record.id)
    steps = result.steps if result is not None else store.steps(record.id)
    return StoredRun(record, steps, store.exchanges(record.id), result, record.id in store.evolutions())
