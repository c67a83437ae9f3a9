"""The curves of a training as a page, and its summary as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtmc_lsp.report.line_chart import lines
from mtmc_lsp.report.page import Page, escape, figure, table
from mtmc_lsp.training.lm.messages import CurvePoint, Phase
from mtmc_lsp.training.lm.parameters import LmParameters
from mtmc_lsp.training.lm.train import TrainedLm

TITLE = "Training of the lm policy"
Value = Callable[[CurvePoint], "float | None"]
SUPERVISED: Mapping[str, Value] = {"loss": lambda point: point.loss if point.phase is Phase.SUPERVISED else None}
REWARDS: Mapping[str, Value] = {
    "training trees": lambda point: point.reward,
    "held-out trees": lambda point: point.validation_reward,
}
CHOICES: Mapping[str, Value] = {
    "supervised batches": lambda point: point.accuracy,
    "held-out versions": lambda point: point.validation_top1,
}
CHARTS: tuple[tuple[str, str, str, Mapping[str, Value]], ...] = (
    ("reward", "Mean total reward of a walk", "reward", REWARDS),
    ("choice", "How often the best measured action is the most probable one", "share", CHOICES),
    ("loss", "Cross-entropy of the supervised start", "loss", SUPERVISED),
    ("entropy", "Entropy of the policy", "nats", {"entropy": lambda point: point.entropy}),
    ("kl", "Change of the policy in an update", "KL divergence", {"KL": lambda point: point.kl}),
    ("value", "Squared error of the value head", "error", {"error": lambda point: point.value_loss}),
    ("length", "Mean steps of a walk, STOP included", "steps", {"steps": lambda point: point.steps}),
)
"""Name, caption, vertical axis and curves of each chart."""
LIMITS = (
    "Rewards and shares are of offline trees: only actions that were measured exist there. How fast the policy makes programs "
    "needs runs on a GPU."
)


def page(trained: TrainedLm, parameters: LmParameters) -> Page:
    """The training as a page with curves."""
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in summary(trained, parameters))
    body = [f"<h1>{escape(TITLE)}</h1>", f"<ul>{facts}</ul>"]
    charts: dict[str, dict[str, Any]] = {}
    for name, caption, axis, curves in CHARTS:
        drawn = {title: points for title, value in curves.items() if len(points := _points(trained.points, value)) > 1}
        if drawn:
            charts[name] = lines(drawn, "update", axis)
            body.append(figure(name, caption))
    rows = [[point.update, point.phase.value, *_numbers(point)] for point in _validated(trained.points)]
    if rows:
        body.append(table(["update", "phase", "best first", "reward on held-out trees"], rows))
    body.append(f'<p class="quiet">{escape(LIMITS)}</p>')
    return Page(TITLE, "\n".join(body), charts)


def summary(trained: TrainedLm, parameters: LmParameters) -> list[str]:
    """What was trained and how it went, one sentence a fact."""
    status = trained.status
    facts = [
        f"Model: {_model_text(parameters)} with {status.parameters} trained weights",
        f"Data: {status.trees} trees, {status.examples} examples of the supervised start, {status.held_out} held-out trees",
        f"Updates: {status.update} of {status.updates}",
    ]
    seconds = sum(point.seconds for point in trained.points)
    facts.append(f"Time: {seconds:.0f} s")
    for phase in Phase:
        if text := _phase_text(phase, [point for point in trained.points if point.phase is phase]):
            facts.append(text)
    if validated := _validated(trained.points):
        top1, reward = _numbers(validated[-1])
        facts.append(f"Held-out families after update {validated[-1].update}: best first {top1}, reward {reward}")
    else:
        facts.append("No family is held out in this data, so nothing is known about other programs")
    return facts


def _model_text(parameters: LmParameters) -> str:
    if parameters.new_model:
        return f"new, of size {parameters.new_model},"
    layers = f"the first {parameters.layers} layers of " if parameters.layers else ""
    return f"{layers}{parameters.model}, LoRA of rank {parameters.lora_rank}"


def _phase_text(phase: Phase, points: Sequence[CurvePoint]) -> str:
    if not points:
        return ""
    first, last = points[0], points[-1]
    if phase is Phase.SUPERVISED:
        return f"Supervised start: loss {_number(first.loss)} to {_number(last.loss)} in {len(points)} updates"
    rewards = f"reward {_number(first.reward)} to {_number(last.reward)}"
    name = "Value warm-up" if phase is Phase.WARM_UP else "PPO"
    return f"{name}: {rewards} in {len(points)} updates"


def _points(points: Sequence[CurvePoint], value: Value) -> list[tuple[float, float]]:
    return [(point.update, number) for point in points if (number := value(point)) is not None]


def _validated(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    return [point for point in points if point.validation_top1 is not None or point.validation_reward is not None]


def _numbers(point: CurvePoint) -> tuple[str, str]:
    share = f"{100 * point.validation_top1:.0f} %" if point.validation_top1 is not None else "not known"
    return share, _number(point.validation_reward)


def _number(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "not known"
