"""Runs the search with a real capture and a model. Only the measurer is fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.results import CompileReport, KernelReport, Timing, Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, RunResult, Step
from mtmc_lsp.core.settings import LlmSettings, Settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.llm.endpoint.recording_model import RecordingModel
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.search.greedy import GreedySearch

WRITES = Backends(coder="llm")
H200 = model_of_arch("sm_90")


class AgreeingMeasurer:
    """Measurer that accepts every candidate except those whose source contains a text of ``wrong``."""

    has_gpu = False
    verifies_beside = False

    def __init__(self, **wrong: str) -> None:
        self.wrong = wrong
        self.seen: list[str] = []
        self.spills: dict[str, int] = {}
        """Spilled bytes of candidates that contain a text."""

    def device(self) -> DeviceModel:
        return H200

    def compile(self, candidate: Candidate) -> CompileReport:
        spills = sum(number for text, number in self.spills.items() if text in candidate.source)
        return CompileReport((KernelReport("ranks_kernel", "sm_90", spills=spills),))

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        self.seen.append(candidate.source)
        for text, reason in self.wrong.items():
            if text in candidate.source:
                return Verdict(VerdictStatus.INCORRECT, (), "interpreter", reason=reason)
        return Verdict(VerdictStatus.CORRECT, (), "interpreter")

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        return None

    def close(self) -> None:
        """Nothing to close."""


def quick_settings(**llm: Any) -> Settings:
    """Settings without retries and with short timeouts."""
    return Settings(llm=replace(LlmSettings(retries=0, timeout_seconds=10.0), **llm))


def run_search(
    capture: Capture,
    source: str,
    model: RecordingModel | None,
    *,
    backends: Backends = WRITES,
    measurer: AgreeingMeasurer | None = None,
    steps: int = 1,
    settings: Settings | None = None,
    done: tuple[Step, ...] = (),
) -> RunResult:
    """One run."""
    planner, coder = backends.open(settings or quick_settings(), model)
    components = SearchComponents(planner, coder, measurer or AgreeingMeasurer(), False, Limits(60.0, steps))
    search = GreedySearch(capture, source, components, Events())
    result = search.run("run", "hash", done)
    return replace(result, model_use=model.use()) if model is not None else result
