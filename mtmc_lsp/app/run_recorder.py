"""Stores a run while it happens: how it was started, its steps, and its exchanges with a language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.run import RunResult, Step
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.endpoint.recording_model import RecordingModel
from mtmc_lsp.search.components import Events
from mtmc_lsp.search.store import Store


@dataclass(frozen=True)
class Revision:
    """A user's decision about one step of a run."""

    kind: str
    """``undo`` or ``another``."""
    run: str
    """The id of the run that the step is in."""
    step: int
    """The step's number."""
    remark: str = ""
    """What the user wants instead, as free text."""


@dataclass(frozen=True)
class RunConfig:
    """How a run was started; enough to replay it, and to write its steps again without a capture."""

    planner: str
    coder: str
    settings: Settings
    plain_hash: str = ""
    """SHA-256 of the file without generated code; empty if unknown, then the hash of the whole file is compared."""
    revision: Revision | None = None
    """For a run that revises another run."""
    fingerprint: str = ""
    """Of the target and everything that its capture found, see :func:`mtmc_lsp.app.stored_runs.fingerprint`."""
    captures: tuple[Capture, ...] = ()
    """The graphs that the steps were written from, one for each region; empty in runs of earlier versions."""
    device: DeviceModel | None = None
    """The GPU that the steps were written for."""
    based_on: str = ""
    """The finished run that this one was written again from; empty if it is not."""

    @property
    def backends(self) -> Backends:
        """The planner and the coder of the run."""
        return Backends(self.planner, self.coder)


class RunRecorder:
    """Stores each step, and what a model was asked for it, before the step is reported."""

    def __init__(
        self, store: Store, run_id: str, config: RunConfig, model: RecordingModel | None, *, first_step: int = 1
    ) -> None:
        """Start to record.

        Args:
            model: the language model that the planner or the coder asks; None if neither asks one.
            first_step: the number of the next step.
        """
        self._store = store
        self._run_id = run_id
        self._model = model
        self._step = first_step
        store.add_config(run_id, config)
        if model is not None:
            model.listen(lambda exchange: store.add_exchange(run_id, self._step, exchange))
            model.resume(store.exchanges(run_id))

    def events(self, events: Events, *, store_replayed: bool = False) -> Events:
        """``events``, with each step stored before it is reported.

        Args:
            store_replayed: whether replayed steps are stored too; they are new to this run if they come from another one.
        """

        def recorded(report: Callable[[Step], None]) -> Callable[[Step], None]:
            def record(step: Step) -> None:
                self._step = step.index + 1
                self._store.add_step(self._run_id, step)
                report(step)

            return record

        def switched(step: Step) -> None:
            # This is an earlier step. Requests to a model belong to the present step.
            self._store.add_step(self._run_id, step)
            events.on_switched(step)

        return replace(
            events,
            on_step=recorded(events.on_step),
            on_replayed=recorded(events.on_replayed) if store_replayed else events.on_replayed,
            on_withdrawn=recorded(events.on_withdrawn),
            on_retimed=recorded(events.on_retimed),
            on_switched=switched,
        )

    def finish(self, result: RunResult) -> RunResult:
        """Store the result, with the tokens and the cost of the model."""
        if self._model is not None:
            result = replace(result, model_use=self._model.use())
        self._store.finish(result)
        return result
