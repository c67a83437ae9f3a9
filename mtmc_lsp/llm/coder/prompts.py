"""Prompts for the coder: one action, its region, the text to edit, and notes on how to implement it well."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mtmc_lsp.actions.base import lines_text
from mtmc_lsp.core.action import REMARK, ActionKind, MacroAction
from mtmc_lsp.core.chat import Message
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.coder.editable_text import EditableCode
from mtmc_lsp.llm.coder.hunks import HUNK_FORMAT
from mtmc_lsp.llm.planner import graph_text, target_text
from mtmc_lsp.llm.prompting import Part, fit_prompt

KNOWLEDGE = Path(__file__).with_name("knowledge")
ARCH_NOTES = {
    "sm_75": "arch-turing",
    "sm_8": "arch-ampere",
    "sm_9": "arch-hopper",
    "sm_10": "arch-blackwell",
    "sm_12": "arch-blackwell",
    "gfx9": "arch-cdna",
    "gfx11": "arch-rdna",
}
"""Prefix of an architecture name, and the name of its note."""
OPERATION_NOTES = {
    r".*conv.*": "op-convolution",
    r".*pool\d?d?.*": "op-pooling",
    r"(?:log)?cum.*": "op-scan",
    r"(?:mm|bmm|addmm|baddbmm|linear|matmul|addmv|mv|dot)": "op-product",
    r"sort|topk|.*median|kthvalue|argsort|searchsorted|bucketize": "op-sort",
    r"gather|scatter.*|index.*|_?embedding.*|bincount|histc|take.*": "op-gather",
    r".*attention.*": "op-attention",
}
"""Pattern for names of ATen operations, and the name of their note."""
SYSTEM = f"""\
You write Triton. You get a short Python text: Triton kernels (perhaps none yet) and one launcher that calls them.
Apply exactly one optimisation to it, in the named region, and change nothing else.

Rules:
- Answer only with search/replace hunks:
{HUNK_FORMAT}
- SEARCH lines must occur exactly once. An empty SEARCH inserts the lines above the launcher: use this for new kernels.
- A kernel is a function decorated with @triton.jit, without type annotations except tl.constexpr for block sizes. torch, triton
  and triton.language as tl are imported. No other imports, no autotune, no classes, no try, no global state.
- The launcher keeps its parameters and return values. In it, torch only allocates (torch.empty, torch.empty_like, ...); the
  computation of the step runs in a kernel: launch it as name[(grid,)](arguments, BLOCK=..., num_warps=...).
- Kernels are correct for every shape: mask loads and stores, take sizes from the launcher's inputs, use 64-bit row offsets.
- Results must be as exact as the original: accumulate fp16 and bf16 in fp32, and never lower the precision of a matmul.
- Each kernel has a one-sentence docstring that says what it computes."""


def coding_messages(
    capture: Capture,
    candidate: Candidate,
    action: MacroAction,
    editable: EditableCode,
    *,
    max_tokens: int,
    rejected_edit: str = "",
    archs: Sequence[str] = (),
) -> list[Message]:
    """The first question for one action. Secrets and paths are removed when it is sent.

    Args:
        candidate: the last accepted version.
        max_tokens: maximum tokens of the question; notes are omitted from longer questions.
        rejected_edit: an earlier edit of this step that the user rejected.
        archs: architectures to compile for if there is no GPU.
    """
    target_archs = [capture.environment.capability] if capture.environment.capability else archs
    region = "\n".join(
        line for line in graph_text(capture.graph).splitlines() if line.partition(":")[0] in {*action.region, "sizes"}
    )
    params = ", ".join(f"{name} = {value}" for name, value in action.params.items() if name not in ("open", REMARK))
    operations = [node.op.split(".")[1] for node in capture.graph.nodes if node.name in action.region]
    notes = knowledge(action.kind, target_archs, operations)
    parts = [
        Part("The user's code", target_text(capture, candidate)),
        Part("Inputs of the launcher", _inputs(capture, editable)),
        *_notes("How to write good kernels", notes["kernels"], spare=1),
        *_notes("Hardware", notes["arch"], spare=4),
        Part(
            "Step",
            f"{action.text} ({lines_text(action.lines)})\n{action.rationale}"
            + (f"\nParameters: {params}" if params else ""),
        ),
        *_notes("How to do this step well", notes["kind"], spare=2),
        *_notes("How to implement these operations well", notes["operations"], spare=3),
        Part("Operations of the region", region or "see the text"),
        *_user_requests(action, rejected_edit),
        Part(f"Text to edit ({editable.launcher} is the launcher)", editable.text),
    ]
    return fit_prompt(SYSTEM, parts, max_tokens)


def _notes(heading: str, notes: Sequence[str], *, spare: int) -> Iterator[Part]:
    if notes:
        yield Part(heading, "\n".join(notes), spare)


def _user_requests(action: MacroAction, rejected_edit: str) -> Iterator[Part]:
    """Remarks of the user about the step."""
    remark = action.params.get(REMARK)
    if remark:
        text = f"{remark}\nThis has priority over everything except correctness and the rules."
        yield Part("The user's request for this step", text)
    if remark and rejected_edit:
        yield Part("The earlier edit that the user rejected", rejected_edit)


def repair_message(failure: str, *, from_scratch: bool) -> Message:
    """The message that reports the error in the last answer and asks for a correction."""
    effect = "The text is unchanged: your hunks were not applied." if from_scratch else "Your edit was undone."
    return Message("user", f"{failure}\n{effect} Answer again with all hunks of the step, against the original text.")


def knowledge(kind: ActionKind, archs: Sequence[str] = (), operations: Iterable[str] = ()) -> dict[str, list[str]]:
    """Notes for a prompt, grouped under ``kernels`` (general advice), ``arch``, ``kind`` and ``operations``.

    Args:
        archs: architecture names such as ``sm_90``.
        operations: operations of the region such as ``convolution``; each note is included once.
    """
    arch_notes = [note for arch in archs for prefix, note in ARCH_NOTES.items() if arch.startswith(prefix)]
    operation_notes = [
        note for name in operations for pattern, note in OPERATION_NOTES.items() if re.fullmatch(pattern, name)
    ]
    groups = {"kernels": ["kernels"], "arch": arch_notes, "kind": [kind.value], "operations": operation_notes}
    return {
        group: [(KNOWLEDGE / f"{name}.md").read_text(encoding="utf-8").strip() for name in dict.fromkeys(note_names)]
        for group, note_names in groups.items()
    }


def _inputs(capture: Capture, editable: EditableCode) -> str:
    lines = []
    for name, item in zip(editable.tensors, capture.graph.inputs, strict=True):
        shape = ", ".join(str(size) for size in item.type.shape)
        layout = "contiguous" if item.type.is_contiguous else f"strides {', '.join(str(s) for s in item.type.stride)}"
        lines.append(f"{name}: {item.type.dtype}[{shape}], {layout}")
    return "\n".join(lines)
