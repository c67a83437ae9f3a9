"""What the coder's model is asked: one action, its region, the text to edit, and a note on how it is done well."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mtmc_lsp.core.action import REMARK, ActionKind, MacroAction
from mtmc_lsp.core.chat import Message
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.coder.editable_text import Sheet
from mtmc_lsp.llm.coder.hunks import FORM
from mtmc_lsp.llm.planner import graph_text, target_text
from mtmc_lsp.llm.prompting import Part, fitted

KNOWLEDGE = Path(__file__).with_name("knowledge")
TOPICS = {
    "sm_75": "arch-turing",
    "sm_8": "arch-ampere",
    "sm_9": "arch-hopper",
    "sm_10": "arch-blackwell",
    "sm_12": "arch-blackwell",
    "gfx9": "arch-cdna",
    "gfx11": "arch-rdna",
}
"""How an architecture's name begins, and the note on it."""
OPERATIONS = {
    r".*conv.*": "op-convolution",
    r".*pool\d?d?.*": "op-pooling",
    r"(?:log)?cum.*": "op-scan",
    r"(?:mm|bmm|addmm|baddbmm|linear|matmul|addmv|mv|dot)": "op-product",
    r"sort|topk|.*median|kthvalue|argsort|searchsorted|bucketize": "op-sort",
    r"gather|scatter.*|index.*|_?embedding.*|bincount|histc|take.*": "op-gather",
    r".*attention.*": "op-attention",
}
"""The names of ATen's operations, and the note on them."""
SYSTEM = f"""\
You write Triton. You are given a short Python text: Triton kernels (perhaps none yet) and one launcher that calls them.
Carry out exactly one optimisation on it, in the region that is named, and change nothing else.

Rules:
- Answer with search/replace hunks, and nothing but hunks:
{FORM}
- SEARCH lines must occur exactly once. An empty SEARCH puts the lines above the launcher: use that for new kernels.
- A kernel is a function under @triton.jit, with full type-free parameters and tl.constexpr for block sizes. torch, triton and
  triton.language as tl are imported. No other imports, no autotune, no classes, no try, no global state.
- The launcher keeps its parameters and what it returns. In it, torch only allocates (torch.empty, torch.empty_like, ...); what
  the step computes is computed in a kernel: launch it as name[(grid,)](arguments, BLOCK=..., num_warps=...).
- Kernels hold for every shape: mask loads and stores, use the sizes the launcher is given, and 64-bit row offsets.
- Results must be as exact as the original: accumulate fp16 and bf16 in fp32, and never lower the precision of a product.
- Each kernel's docstring says in a sentence what it computes."""


def coding_messages(
    capture: Capture,
    candidate: Candidate,
    action: MacroAction,
    sheet: Sheet,
    *,
    most_tokens: int,
    unwanted: str = "",
    archs: Sequence[str] = (),
) -> list[Message]:
    """The first question for one action; secrets and paths are taken out where it is sent.

    Args:
        capture: the target.
        candidate: the last good version.
        action: what is to be done.
        sheet: what may be edited of it.
        most_tokens: of the question; notes are left out where it would be longer.
        unwanted: the edit that the user had and asked for another of.
        archs: what kernels are compiled for where there is no GPU.
    """
    known = [capture.environment.capability] if capture.environment.capability else archs
    region = "\n".join(
        line for line in graph_text(capture.graph).splitlines() if line.partition(":")[0] in {*action.region, "sizes"}
    )
    params = ", ".join(f"{name} = {value}" for name, value in action.params.items() if name not in ("open", REMARK))
    operations = [node.op.split(".")[1] for node in capture.graph.nodes if node.name in action.region]
    notes = knowledge(action.kind, known, operations)
    parts = [
        Part("The user's code", target_text(capture, candidate)),
        Part("Inputs of the launcher", _inputs(capture, sheet)),
        *_notes("How kernels are written well", notes["kernels"], spare=1),
        *_notes("The hardware", notes["arch"], spare=4),
        Part("The step", f"{action.text}\n{action.rationale}" + (f"\nIn numbers: {params}" if params else "")),
        *_notes("How this step is done well", notes["kind"], spare=2),
        *_notes("How such operations are done well", notes["operations"], spare=3),
        Part("Operations of the region", region or "see the text"),
        *_wishes(action, unwanted),
        Part(f"The text to edit ({sheet.launcher} is the launcher)", sheet.text),
    ]
    return fitted(SYSTEM, parts, most_tokens)


def _notes(head: str, notes: Sequence[str], *, spare: int) -> Iterator[Part]:
    if notes:
        yield Part(head, "\n".join(notes), spare)


def _wishes(action: MacroAction, unwanted: str) -> Iterator[Part]:
    """What the user said about the step."""
    remark = action.params.get(REMARK)
    if remark:
        told = f"{remark}\nThis comes before everything but correctness and the rules."
        yield Part("What the user asks of this step", told)
    if remark and unwanted:
        yield Part("The edit that the user had and did not want", unwanted)


def repair_message(failure: str, *, from_scratch: bool) -> Message:
    """What is wrong with the last answer, and what to do."""
    where = "The text is unchanged: your hunks were not applied." if from_scratch else "Your edit was undone."
    return Message(
        "user", f"{failure}\n{where} Answer again with all hunks of the step, against the text as first given."
    )


def knowledge(kind: ActionKind, archs: Sequence[str] = (), operations: Iterable[str] = ()) -> dict[str, list[str]]:
    """Notes on how it is done well, under ``kernels`` (at large), ``arch``, ``kind`` and ``operations``.

    Args:
        kind: of the action.
        archs: such as ``sm_90``.
        operations: of the region, such as ``convolution``; each topic is told once.
    """
    of_archs = [topic for arch in archs for start, topic in TOPICS.items() if arch.startswith(start)]
    of_region = [topic for name in operations for form, topic in OPERATIONS.items() if re.fullmatch(form, name)]
    names = {"kernels": ["kernels"], "arch": of_archs, "kind": [kind.value], "operations": of_region}
    return {
        about: [(KNOWLEDGE / f"{name}.md").read_text(encoding="utf-8").strip() for name in dict.fromkeys(found)]
        for about, found in names.items()
    }


def _inputs(capture: Capture, sheet: Sheet) -> str:
    lines = []
    for name, item in zip(sheet.tensors, capture.graph.inputs, strict=True):
        shape = ", ".join(str(size) for size in item.type.shape)
        layout = "contiguous" if item.type.is_contiguous else f"strides {', '.join(str(s) for s in item.type.stride)}"
        lines.append(f"{name}: {item.type.dtype}[{shape}], {layout}")
    return "\n".join(lines)
