"""The planner that asks a language model: it may choose one of the listed legal actions, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.chat import BudgetSpent, ChatModel, Message, ModelFailed, truncate_answer, truncation_notice
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Candidate, Step
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.profile_text import profile_text
from mtmc_lsp.llm.prompting import Part, fitted
from mtmc_lsp.source.compose import strip_generated
from mtmc_lsp.source.targets import find_definition

MOST_LISTED = 24
"""Actions in a prompt, those that the model of the device ranks highest."""
MOST_NODES = 120
"""Operations of the graph that a prompt lists."""
LONGEST_REASON = 240
SYSTEM = """\
You choose the next optimisation of a PyTorch function that is being turned into Triton kernels, one step at a time.
Another program writes, checks and measures the step; a step that is wrong or slower is undone.
Choose exactly one action from the numbered list, the one that you expect to save the most time and that is likely to
be written correctly. Learn from the history. Choose 0, where it is in the list, when nothing is worth trying.
Answer with JSON alone: {"action": NUMBER, "reason": "why this one, in one sentence"}"""


class Ranking(Protocol):
    """Who knows the legal actions."""

    def ranked(self, state: State) -> list[MacroAction]:
        """Every legal action that was not tried, best first."""


class LlmPlanner:
    """Lists the legal actions to a model, which chooses one; where it gives no usable choice the first is taken."""

    def __init__(self, model: ChatModel, ranking: Ranking, *, context_tokens: int) -> None:
        """Ask ``model`` for one of the actions of ``ranking``, in prompts of at most ``context_tokens``."""
        self._model = model
        self._ranking = ranking
        self._context_tokens = context_tokens

    def propose(self, state: State) -> MacroAction | None:
        """The model's choice.

        Raises:
            ModelNotUsable: the endpoint, the key or the model is not there.
        """
        actions = self._ranking.ranked(state)[:MOST_LISTED]
        if not actions:
            return None
        try:
            choice, reason = self._choice(state, actions)
        except BudgetSpent:
            return None
        except ModelFailed as failure:
            return replace(actions[0], rationale=f"{actions[0].rationale} (No choice of the model: {failure.message}.)")
        if choice == 0:
            return None
        action = actions[choice - 1]
        return replace(action, rationale=f"{action.rationale} The model: {reason}" if reason else action.rationale)

    def _choice(self, state: State, actions: Sequence[MacroAction]) -> tuple[int, str]:
        """The number and the reason; an illegal answer is told so once.

        Raises:
            ModelFailed: the second answer is none either.
        """
        messages = planning_messages(state, actions, self._context_tokens)
        least, count = least_choice(state), len(actions)
        schema = answer_schema(count, least)
        wrong = ""
        for _ in range(2):
            reply = self._model.ask("plan", messages, schema=schema)[0]
            try:
                return read_choice(reply.text, count, least)
            except ValueError as error:
                wrong = f"{error} {truncation_notice(reply)}".strip()
            told = Message("user", f"{wrong} Answer again.")
            messages = [*messages, Message("assistant", truncate_answer(reply.text)), told]
        raise ModelFailed(wrong.rstrip("."))


def least_choice(state: State) -> int:
    """The least number that may be answered: a run does not end before anything was tried."""
    return 0 if state.history else 1


def answer_schema(count: int, least: int = 0) -> dict[str, object]:
    """The JSON schema of an answer to a list of ``count`` actions; ``least`` is 1 where one must be chosen."""
    return {
        "type": "object",
        "properties": {
            "action": {"type": "integer", "enum": list(range(least, count + 1))},
            "reason": {"type": "string"},
        },
        "required": ["action", "reason"],
        "additionalProperties": False,
    }


def read_choice(answer: str, count: int, least: int = 0) -> tuple[int, str]:
    """The number and the reason in an answer.

    Raises:
        ValueError: there is no legal one; says why, for the model.
    """
    found: dict[str, object] | None = None
    for start in (match.start() for match in re.finditer(r"\{", answer)):
        try:
            value, _ = json.JSONDecoder().raw_decode(answer, start)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict) and "action" in value:
            found = value
            break
    if found is None:
        numbers = set(re.findall(r"\baction\W{1,4}(\d+)\b", answer, re.IGNORECASE))
        if len(numbers) != 1:
            raise ValueError('The answer names no action. Write JSON: {"action": NUMBER, "reason": "..."}.')
        found = {"action": int(numbers.pop())}
    number = found["action"]
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= count:
        none = "" if least else ", or 0 for none"
        raise ValueError(f"{number!r} is not in the list; choose a number from 1 to {count}{none}.")
    reason = " ".join(str(found.get("reason") or "").split())
    if reason.strip(" .,") in SYSTEM:
        # Small models copy the example.
        reason = ""
    return number, reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."


def planning_messages(state: State, actions: Sequence[MacroAction], most_tokens: int) -> list[Message]:
    """What the model is asked, if possible in ``most_tokens``; secrets and paths are taken out where it is sent."""
    listed = "\n".join(
        f"{i}. {action.text} [{action.kind.value}] - {action.rationale}"
        f" Estimated saving {action.expected.saved_us:.1f} us."
        f"{' Changes rounding.' if action.changes_rounding else ''}"
        for i, action in enumerate(actions, 1)
    )
    block = state.candidate.code.block if state.candidate.code is not None else "none yet"
    if least_choice(state) == 0:
        listed += "\n0. nothing: what is left is not worth trying, and the run ends"
    parts = [
        Part("The user's code", target_text(state.capture, state.candidate)),
        Part("Its operations", graph_text(state.capture.graph), spare=2),
        Part("The device", device_text(state.device)),
        Part("History", "\n".join(step_text(step) for step in state.history) or "this is the first step", spare=1),
        Part("The kernels so far", block, spare=3),
        Part("Profile of the present version", profile_text(state)),
        Part("Legal actions", listed),
    ]
    return fitted(SYSTEM, parts, most_tokens)


def target_text(capture: Capture, candidate: Candidate) -> str:
    """The target alone, as the user wrote it: the rest of the file is not sent."""
    target = capture.workload.target
    plain = strip_generated(candidate.source.encode(), target.qualname)
    return (find_definition(plain, target.path, target.qualname).node.text or b"").decode()


def graph_text(graph: Graph) -> str:
    """Inputs and operations with shapes and types, one a line."""
    lines = [
        f"{item.name}: {item.type.dtype}[{_shape(item.type.shape)}] (input {item.access})" for item in graph.inputs
    ]
    for node in graph.nodes[:MOST_NODES]:
        made = ", ".join(f"{kind.dtype}[{_shape(kind.shape)}]" for kind in node.outputs)
        read = ", ".join(dict.fromkeys(ref.name for ref in node.inputs()))
        lines.append(f"{node.name}: {made} = {node.op}({read})" + (f"  # line {node.line}" if node.line else ""))
    if len(graph.nodes) > MOST_NODES:
        lines.append(f"... and {len(graph.nodes) - MOST_NODES} more")
    if graph.sizes:
        lines.append("sizes: " + ", ".join(f"{name}={value}" for name, value in graph.sizes.items()))
    return "\n".join(lines)


def _shape(shape: Sequence[object]) -> str:
    return ", ".join(str(size) for size in shape)


def device_text(device: DeviceModel) -> str:
    """What a kernel can count on."""
    peaks = ", ".join(f"{name} {rate / 1e12:.0f}" for name, rate in device.flops.items())
    return (
        f"{device.name} ({device.arch}): {device.sm_count} multiprocessors, {device.shared_bytes / 1024:.0f} KiB shared "
        f"memory a block, {device.l2_bytes / 2**20:.0f} MiB L2, {device.bandwidth / 1e12:.2f} TB/s"
        + (f"; TFLOP/s: {peaks}" if peaks else "")
        + f"; one more kernel costs about {device.launch_us:g} us"
        + ("" if device.is_calibrated else "; from the data sheet, not measured")
    )


def step_text(step: Step) -> str:
    """One step of the history."""
    return f"{step.index}. {step.action.text}: {step.status.value}, {step.reason}"
