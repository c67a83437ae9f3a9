"""What a search works with, and what keeps all that it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mtmc_lsp.app.backends import Backends, LedgerModel
from mtmc_lsp.core.chat import Exchange
from mtmc_lsp.core.protocols import Coder, Measurer, Planner
from mtmc_lsp.core.run import RunResult, Step
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.search.greedy import Events, Limits
from mtmc_lsp.search.store import Store


@dataclass(frozen=True)
class SearchComponents:
    """What a search works with."""

    planner: Planner
    coder: Coder
    measurer: Measurer
    has_gpu: bool
    limits: Limits
    model: LedgerModel | None = None
    """Whom the planner or the coder asks."""
    setup: RunConfig | None = None
    """What the run is to be replayed with; None where that makes no sense."""


@dataclass(frozen=True)
class Revision:
    """What a user wanted otherwise in a run."""

    kind: str
    """``undo`` or ``another``."""
    run: str
    """The run whose steps are gone by."""
    step: int
    """The number of the step that is not wanted."""
    remark: str = ""
    """The user's own words on it."""


@dataclass(frozen=True)
class RunConfig:
    """How a run was asked for."""

    planner: str
    coder: str
    settings: Settings
    plain_hash: str = ""
    """SHA-256 of the file without our own code in it; empty where it is not known, and the whole file's stands for it."""
    revision: Revision | None = None
    """Where the run came of another one."""

    @property
    def makers(self) -> Backends:
        """Who planned and who wrote."""
        return Backends(self.planner, self.coder)


class RunRecorder:
    """Stores a run's steps and what a model was asked for them, each before it is shown."""

    def __init__(self, store: Store, run_id: str, tools: SearchComponents, *, number: int = 1) -> None:
        """Keep what happens from step ``number`` on."""
        self._store = store
        self._run = run_id
        self._model = tools.model
        self._number = number
        if tools.setup is not None:
            store.note_setup(run_id, tools.setup)
        if self._model is not None:
            self._model.listen(self._exchange)
            self._model.resume(store.exchanges(run_id))

    def events(self, events: Events, *, also_replayed: bool = False) -> Events:
        """``events`` with the steps stored first; ``also_replayed`` is for steps that come from another run."""

        def keeping(told: Callable[[Step], None]) -> Callable[[Step], None]:
            def tell(step: Step) -> None:
                self._number = step.index + 1
                self._store.add_step(self._run, step)
                told(step)

            return tell

        replayed = keeping(events.on_replayed) if also_replayed else events.on_replayed
        return replace(
            events, on_step=keeping(events.on_step), on_replayed=replayed, on_withdrawn=keeping(events.on_withdrawn)
        )

    def _exchange(self, exchange: Exchange) -> None:
        self._store.add_exchange(self._run, self._number, exchange)

    def finish(self, result: RunResult) -> RunResult:
        """Store the result, with what the model cost."""
        if self._model is not None:
            result = replace(result, model_use=self._model.use())
        self._store.finish(result)
        return result
