"""The ``lm`` policy: a language model weighs the actions' texts. Scoring runs in a worker process."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.errors import FailureKind, MtmcError, WorkerFailed
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.protocols import State
from mtmc_lsp.policies.history import tried_actions
from mtmc_lsp.policies.lm.action_text import STOP_TEXT, action_text, action_texts
from mtmc_lsp.policies.lm.brief import brief_action, brief_action_texts, brief_schedule, brief_task
from mtmc_lsp.policies.lm.messages import ScoreRequest, Scores
from mtmc_lsp.policies.lm.numbers import action_numbers, choices_text, numbered_texts, version_text
from mtmc_lsp.policies.lm.policy_folder import LmPolicyDescription, read_description
from mtmc_lsp.policies.lm.prompt import QUESTION, Tried, device_text, schedule_text, state_text, task_text
from mtmc_lsp.policies.state_features import Version, version_of
from mtmc_lsp.process.protocol import GpuLock
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.schedule.schedule import Schedule

LOAD_SECONDS = 300.0
"""Limit for the first decision, which loads the model; a GGUF file is dequantised."""
SCORE_SECONDS = 60.0
"""Limit for a later decision."""


@dataclass(frozen=True)
class Latency:
    """Times of the decisions so far."""

    decisions: int
    median_seconds: float
    longest_seconds: float
    load_seconds: float

    @property
    def text(self) -> str:
        """``5 decisions, median 0.41 s, longest 1.20 s, after 3.1 s to load the model``."""
        times = f"median {self.median_seconds:.2f} s, longest {self.longest_seconds:.2f} s"
        return f"{self.decisions} decisions, {times}, after {self.load_seconds:.1f} s to load the model"


class LmPolicy:
    """Weighs actions by the probability that a language model gives to their texts."""

    name = "lm"

    def __init__(
        self, folder: Path, *, python: str = sys.executable, lock: GpuLock | None = None, device: str = ""
    ) -> None:
        """Read the policy's description; the model is loaded by the first decision.

        Args:
            folder: the folder ``policy`` that the training wrote.
            python: the interpreter with torch, transformers and peft.
            lock: the GPU lock to share, so that the model never runs during a timing.
            device: ``cpu`` or ``cuda``; empty for the GPU if there is a lock to share, otherwise the CPU.

        Raises:
            RequestError: the folder holds no usable policy.
        """
        self.description = read_description(folder)
        self._folder = folder.absolute()  # The worker has another current folder.
        self._lock = lock
        self._device = device or ("cpu" if lock is None else "cuda")
        self.worker = Worker(python, cwd=str(self._folder), low_priority=False)
        self.answers: list[Scores] = []
        """Of all decisions so far."""
        self._load_seconds = 0.0
        self._version: tuple[tuple[object, object, object], Version] | None = None

    def choices(self, state: State, actions: Sequence[MacroAction]) -> list[Choice]:
        """The probability of each action and of STOP, the most probable first.

        Raises:
            EnvironmentNotAble: a package is missing.
            RequestError: the model or its adapter cannot be loaded.
            WorkerFailed: the worker crashed or took too long; the next call starts another one.
        """
        version = self._version_of(state)
        text = describe(state, actions, self.description, version)
        texts = (*choice_texts(actions, version, names=self.description.names), STOP_TEXT)
        request = ScoreRequest(str(self._folder), self._device, text, texts)
        end = float("inf") if state.deadline is None else state.deadline
        limit = SCORE_SECONDS if self._load_seconds else LOAD_SECONDS
        try:
            scores = self.worker.call(request, limit, self._lock, end)
        except WorkerFailed as error:
            if error.kind is not FailureKind.TIMEOUT:
                raise
            task = "decision" if self._load_seconds else "first decision, which loads the model,"
            raise WorkerFailed(
                f"its {task} took longer than the run allows", kind=error.kind, remedy="Give the run a larger --budget."
            ) from None
        self.answers.append(scores)
        self._load_seconds = scores.load_seconds or self._load_seconds
        probabilities = with_stop_margin(scores.probabilities, self.description.stop_margin)
        options = sorted(zip(probabilities, (*actions, None), texts, strict=True), key=lambda each: -each[0])
        about = _about(state, self.description)
        return [
            Choice(action, probability, _reason(probability, index, [(p, t) for p, _, t in options], about))
            for index, (probability, action, _) in enumerate(options)
        ]

    def load(self) -> None:
        """Load the model, which takes seconds, so that the first decision does not wait as long."""
        with contextlib.suppress(MtmcError):
            request = ScoreRequest(str(self._folder), self._device, QUESTION, (STOP_TEXT,))
            self._load_seconds = self.worker.call(request, LOAD_SECONDS, self._lock).load_seconds

    def _version_of(self, state: State) -> Version:
        """The present version with its predicted time; consecutive decisions share it."""
        key = (state.capture, state.candidate, state.device)
        if self._version is None or any(a is not b for a, b in zip(key, self._version[0], strict=True)):
            self._version = (key, version_of(state))
        return self._version[1]

    @property
    def latency(self) -> Latency | None:
        """Times of the decisions so far; None before the first one."""
        if not self.answers:
            return None
        seconds = [answer.seconds for answer in self.answers]
        return Latency(len(seconds), statistics.median(seconds), max(seconds), self._load_seconds)

    def close(self) -> None:
        """End the worker."""
        self.worker.close()


def with_stop_margin(probabilities: Sequence[float], margin: float) -> list[float]:
    """The probabilities if that of STOP, the last one, counts less."""
    if not margin:
        return list(probabilities)
    weights = [*probabilities[:-1], probabilities[-1] * math.exp(-margin)]
    total = math.fsum(weights)
    return [weight / total for weight in weights] if total > 0 else list(probabilities)


def choice_texts(actions: Sequence[MacroAction], version: Version, *, names: bool = True) -> list[str]:
    """The choices as the policy was trained to read them: what the cost model predicts, and the action."""
    numbers = [action_numbers(action, version) for action in actions]
    texts = action_texts(actions) if names else brief_action_texts(actions)
    return numbered_texts(texts, numbers, version.predicted_us)


def describe(
    state: State, actions: Sequence[MacroAction], description: LmPolicyDescription, version: Version | None = None
) -> str:
    """The state as the policy was trained to read it.

    Args:
        actions: the choices besides STOP.
        version: of the state, if it is known already.
    """
    version = version or version_of(state)
    schedule = from_json(Schedule, state.candidate.schedule)
    tokens = description.state_tokens
    return state_text(
        device_text(state.device) if description.hardware else "",
        task_text(state.capture.graph, tokens=tokens) if description.names else brief_task(state.capture),
        f"{schedule_text(schedule, tokens=tokens) if description.names else brief_schedule(schedule)}\n{version_text(version)}",
        tried_steps(state, names=description.names) if description.history else [],
        choices_text([action_numbers(action, version) for action in actions], version.predicted_us),
        tokens=tokens,
    )


def tried_steps(state: State, *, names: bool = True) -> list[Tried]:
    """The history of a run in the form of the training data."""
    return [
        Tried(action_text(step.action) if names else brief_action(step.action), tried.outcome, tried.ratio)
        for step, tried in zip(state.history, tried_actions(state.history), strict=True)
    ]


def _reason(probability: float, index: int, options: Sequence[tuple[float, str]], about: str) -> str:
    """What decided, as far as a language model can tell: its margin, and the parts of the state that it read."""
    other = options[1 if index == 0 else 0] if len(options) > 1 else None
    margin = ""
    if other is not None:
        word = "next" if index == 0 else "first"
        margin = f"; {word}: {other[1].rstrip('.')} with {other[0]:.2f}"
    return f"probability {probability:.2f} of {len(options)} choices{margin}; the model read {about}"


def _about(state: State, description: LmPolicyDescription) -> str:
    """The parts of the state in a few words."""
    kernels = len(from_json(Schedule, state.candidate.schedule).kernels)
    parts = [f"{len(state.capture.graph.nodes)} operations", f"{kernels} kernels"]
    if description.history:
        parts.append(f"{len(state.history)} tried steps")
    if description.hardware:
        parts.append(f"the numbers of {state.device.name}")
    return ", ".join(parts)
