"""A stored run with everything that is known of it, whether it was finished or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.core.chat import Exchange
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.run import RunResult, Step
from mtmc_lsp.search.store import RunRecord, Store


@dataclass(frozen=True)
class StoredRun:
    """A run as the store has it."""

    record: RunRecord
    steps: Sequence[Step]
    exchanges: Sequence[Exchange]
    result: RunResult | None
    """``None`` where it was not finished."""


def stored_run(store: Store, name: str = "") -> StoredRun:
    """The run called ``name``, or that begins so; without a name the newest.

    Raises:
        RequestError: there is none, or several begin so.
    """
    found = [record for record in store.runs() if record.id.startswith(name)]
    if not found or (name and len(found) > 1):
        which = f"run {name!r}" if name else "run"
        problem = f"there is no {which}" if not found else f"several runs begin with {name!r}"
        raise RequestError(problem, where=Location(str(store.folder)), remedy="See `mtmc runs`.")
    record = found[0]
    result = store.result(record.id)
    steps = result.steps if result is not None else store.steps(record.id)
    return StoredRun(record, steps, store.exchanges(record.id), result)
