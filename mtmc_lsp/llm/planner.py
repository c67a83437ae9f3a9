"""Planner that lets a language model choose one action from the list of legal actions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.actions.base import lines_text
from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.chat import BudgetSpent, ChatModel, Message, ModelFailed, truncate_answer, truncation_notice
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.profile_text import profile_text
from mtmc_lsp.llm.prompting import Part, fit_prompt
from mtmc_lsp.planners.roofline import NOTHING_LEFT, RooflinePlanner
from mtmc_lsp.source.compose import strip_generated
from mtmc_lsp.source.targets import find_definition

MAX_ACTIONS = 24
"""Maximum number of actions in a prompt: those ranked highest by the cost model."""
MAX_OPERATIONS = 120
"""Maximum number of graph operations in a prompt."""
MAX_REASON_LENGTH = 240
MODEL_STOPS = "the model expects no gain from another step"
SYSTEM = """\
You choose the next optimisation of a PyTorch function that is converted to Triton kernels, one step at a time.
Another program implements, verifies and times the step; an incorrect or slower step is undone.
Choose exactly one action from the numbered list: the one that you expect to save the most time and that is likely to be
implemented correctly. Learn from the history. If 0 is in the list, choose 0 when no action is worth trying.
Answer with JSON only: {"action": NUMBER, "reason": "why this action, in one sentence"}"""


class LlmPlanner:
    """Asks a model to choose one of the legal actions. Falls back to the first action if the answer is unusable."""

    def __init__(self, model: ChatModel, ranking: RooflinePlanner, *, context_tokens: int) -> None:
        """Ask ``model`` to choose among the actions of ``ranking``, with prompts of at most ``context_tokens`` tokens."""
        self._model = model
        self._ranking = ranking
        self._context_tokens = context_tokens

    def propose(self, state: State) -> MacroAction | Stop:
        """The action that the model chose, or its decision to stop.

        Raises:
            ModelNotUsable: the endpoint, the API key or the model is missing or invalid.
        """
        actions = self._ranking.ranked(state)[:MAX_ACTIONS]
        if not actions:
            return NOTHING_LEFT
        try:
            choice, reason = self._choice(state, actions)
        except BudgetSpent as spent:
            return Stop(str(spent))
        except ModelFailed as failure:
            return replace(
                actions[0],
                rationale=f"{actions[0].rationale} (Fallback, the model gave no usable choice: {failure.message}.)",
            )
        if choice == 0:
            return Stop(f"the model expects no gain from another step: {reason}" if reason else MODEL_STOPS)
        action = actions[choice - 1]
        return replace(action, rationale=f"{action.rationale} The model: {reason}" if reason else action.rationale)

    def _choice(self, state: State, actions: Sequence[MacroAction]) -> tuple[int, str]:
        """The number of the action and the reason. After an invalid answer, the model is asked once more.

        Raises:
            ModelFailed: the second answer is invalid too.
        """
        messages = planning_messages(state, actions, self._context_tokens)
        min_number, count = min_choice(state), len(actions)
        schema = answer_schema(count, min_number)
        error_text = ""
        for _ in range(2):
            reply = self._model.ask("plan", messages, schema=schema)[0]
            try:
                return parse_choice(reply.text, count, min_number)
            except ValueError as error:
                error_text = f"{error} {truncation_notice(reply)}".strip()
            correction = Message("user", f"{error_text} Answer again.")
            messages = [*messages, Message("assistant", truncate_answer(reply.text)), correction]
        raise ModelFailed(error_text.rstrip("."))


def min_choice(state: State) -> int:
    """The smallest valid answer: 1 in the first step, because a run must not end before any action was tried."""
    return 0 if state.history else 1


def answer_schema(count: int, min_number: int = 0) -> dict[str, object]:
    """The JSON schema of an answer to a list of ``count`` actions. ``min_number`` is 1 if an action must be chosen."""
    return {
        "type": "object",
        "properties": {
            "action": {"type": "integer", "enum": list(range(min_number, count + 1))},
            "reason": {"type": "string"},
        },
        "required": ["action", "reason"],
        "additionalProperties": False,
    }


def parse_choice(answer: str, count: int, min_number: int = 0) -> tuple[int, str]:
    """Parse the number and the reason from an answer.

    Raises:
        ValueError: the answer contains no legal number. The message is sent to the model.
    """
    choice: dict[str, object] | None = None
    for start in (match.start() for match in re.finditer(r"\{", answer)):
        try:
            value, _ = json.JSONDecoder().raw_decode(answer, start)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict) and "action" in value:
            choice = value
            break
    if choice is None:
        numbers = set(re.findall(r"\baction\W{1,4}(\d+)\b", answer, re.IGNORECASE))
        if len(numbers) != 1:
            raise ValueError('The answer contains no action number. Write JSON: {"action": NUMBER, "reason": "..."}.')
        choice = {"action": int(numbers.pop())}
    number = choice["action"]
    if isinstance(number, bool) or not isinstance(number, int) or not min_number <= number <= count:
        zero_hint = "" if min_number else ", or 0 for none"
        raise ValueError(f"{number!r} is not in the list; choose a number from 1 to {count}{zero_hint}.")
    reason = " ".join(str(choice.get("reason") or "").split())
    if reason.strip(" .,") in SYSTEM:
        # Small models copy the reason from the example in the system prompt.
        reason = ""
    return number, reason if len(reason) <= MAX_REASON_LENGTH else f"{reason[:MAX_REASON_LENGTH]}..."


def planning_messages(state: State, actions: Sequence[MacroAction], max_tokens: int) -> list[Message]:
    """The planning prompt, if possible within ``max_tokens``. Secrets and paths are removed when it is sent."""
    listed = "\n".join(
        f"{i}. {action.text} ({lines_text(action.lines)}) [{action.kind.value}] - {action.rationale}"
        f" Estimated saving {action.expected.saved_us:.1f} us."
        f"{' Changes rounding.' if action.changes_rounding else ''}"
        for i, action in enumerate(actions, 1)
    )
    history = [f"{step.index}. {step.action.text}: {step.status.value}, {step.reason}" for step in state.history]
    block = state.candidate.code.block if state.candidate.code is not None else "none yet"
    if min_choice(state) == 0:
        listed += "\n0. nothing: no remaining action is worth trying; the run ends"
    parts = [
        Part("The user's code", target_text(state.capture, state.candidate)),
        Part("Graph operations", graph_text(state.capture.graph), spare=2),
        Part("Device", device_text(state.device)),
        Part("History", "\n".join(history) or "this is the first step", spare=1),
        Part("Current kernels", block, spare=3),
        Part("Profile of the current version", profile_text(state)),
        Part("Legal actions", listed),
    ]
    return fit_prompt(SYSTEM, parts, max_tokens)


def target_text(capture: Capture, candidate: Candidate) -> str:
    """The source of the target as the user wrote it. The rest of the file is not sent."""
    target = capture.workload.target
    plain = strip_generated(candidate.source.encode(), target.qualname)
    return (find_definition(plain, target.path, target.qualname).node.text or b"").decode()


def graph_text(graph: Graph) -> str:
    """Inputs and operations with shapes and dtypes, one per line."""
    lines = [
        f"{item.name}: {item.type.dtype}[{_shape(item.type.shape)}] (input {item.access})" for item in graph.inputs
    ]
    for node in graph.nodes[:MAX_OPERATIONS]:
        outputs = ", ".join(f"{kind.dtype}[{_shape(kind.shape)}]" for kind in node.outputs)
        operands = ", ".join(dict.fromkeys(ref.name for ref in node.inputs()))
        lines.append(f"{node.name}: {outputs} = {node.op}({operands})" + (f"  # line {node.line}" if node.line else ""))
    if len(graph.nodes) > MAX_OPERATIONS:
        lines.append(f"... and {len(graph.nodes) - MAX_OPERATIONS} more")
    if graph.sizes:
        lines.append("sizes: " + ", ".join(f"{name}={value}" for name, value in graph.sizes.items()))
    return "\n".join(lines)


def _shape(shape: Sequence[object]) -> str:
    return ", ".join(str(size) for size in shape)


def device_text(device: DeviceModel) -> str:
    """Device properties that matter for kernels."""
    peak_rates = ", ".join(f"{name} {rate / 1e12:.0f}" for name, rate in device.flops.items())
    return (
        f"{device.name} ({device.arch}): {device.sm_count} multiprocessors, {device.shared_bytes / 1024:.0f} KiB shared "
        f"memory per block, {device.l2_bytes / 2**20:.0f} MiB L2, {device.bandwidth / 1e12:.2f} TB/s"
        + (f"; TFLOP/s: {peak_rates}" if peak_rates else "")
        + f"; launch overhead about {device.launch_us:g} us per kernel"
        + ("" if device.is_calibrated else "; data sheet values, not measured")
    )
