"""What the coder's model is asked: one action, its region, the text to edit, and a note on how it is done well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mtmc_lsp.core.action import REMARK, ActionKind, MacroAction
from mtmc_lsp.core.chat import Message
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.macro.llm import graph_text, target_text
from mtmc_lsp.micro.llm.sheet import Sheet

KNOWLEDGE = Path(__file__).with_name("knowledge")
TOPICS = {"sm_8": "arch-ampere", "sm_9": "arch-hopper", "gfx9": "arch-cdna"}
"""How an architecture's name begins, and the note on it."""
SYSTEM = """\
You write Triton. You are given a short Python text: Triton kernels (perhaps none yet) and one launcher that calls them.
Carry out exactly one optimisation on it, in the region that is named, and change nothing else.

Rules:
- Answer with search/replace hunks, and nothing but hunks:
<<<<<<< SEARCH
lines exactly as they stand in the text now
=======
the lines that take their place
>>>>>>> REPLACE
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
    unwanted: str = "",
    archs: Sequence[str] = (),
) -> list[Message]:
    """The first question for one action; secrets and paths are taken out where it is sent.

    ``unwanted`` is the edit that the user had and asked for another of; ``archs`` is what kernels are compiled for where there
    is no GPU.
    """
    known = [capture.environment.capability] if capture.environment.capability else archs
    region = "\n".join(
        line for line in graph_text(capture.graph).splitlines() if line.partition(":")[0] in {*action.region, "sizes"}
    )
    params = ", ".join(f"{name} = {value}" for name, value in action.params.items() if name not in ("open", REMARK))
    parts = [
        ("The step", f"{action.text}\n{action.rationale}" + (f"\nIn numbers: {params}" if params else "")),
        *_wishes(action, unwanted),
        ("The user's code", target_text(capture, candidate)),
        ("Inputs of the launcher", _inputs(capture, sheet)),
        ("Operations of the region", region or "see the text"),
        (
            "How this is done well",
            knowledge(action.kind, known),
        ),
        (f"The text to edit ({sheet.launcher} is the launcher)", sheet.text),
    ]
    return [Message("system", SYSTEM), Message("user", "\n\n".join(f"# {head}\n{text}" for head, text in parts))]


def _wishes(action: MacroAction, unwanted: str) -> Iterator[tuple[str, str]]:
    """What the user said about the step."""
    remark = action.params.get(REMARK)
    if remark:
        yield (
            "What the user asks of this step",
            f"{remark}\nThis comes before everything but correctness and the rules.",
        )
    if remark and unwanted:
        yield "The edit that the user had and did not want", unwanted


def repair_message(failure: str, *, from_scratch: bool) -> Message:
    """What is wrong with the last answer, and what to do."""
    where = "The text is unchanged: your hunks were not applied." if from_scratch else "Your edit was undone."
    return Message(
        "user", f"{failure}\n{where} Answer again with all hunks of the step, against the text as first given."
    )


def knowledge(kind: ActionKind, archs: Sequence[str] = ()) -> str:
    """The note on a kind of action, the one on kernels at large, and those on the architectures."""
    topics = dict.fromkeys(topic for arch in archs for start, topic in TOPICS.items() if arch.startswith(start))
    notes = [KNOWLEDGE / f"{name}.md" for name in ("kernels", kind.value, *topics)]
    return "\n".join(note.read_text(encoding="utf-8").strip() for note in notes)


def _inputs(capture: Capture, sheet: Sheet) -> str:
    lines = []
    for name, item in zip(sheet.tensors, capture.graph.inputs, strict=True):
        shape = ", ".join(str(size) for size in item.type.shape)
        layout = "contiguous" if item.type.is_contiguous else f"strides {', '.join(str(s) for s in item.type.stride)}"
        lines.append(f"{name}: {item.type.dtype}[{shape}], {layout}")
    return "\n".join(lines)
