"""Prompts: valid notes, prompts that fit the limit, and a shared prefix."""

from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest
import triton.language as tl
from answers import SOURCE

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import GRAPH_KINDS, ActionKind, MacroAction
from mtmc_lsp.core.chat import Message, estimated_tokens
from mtmc_lsp.llm.coder.code_policy import ALLOCATION, TL_SUBMODULES, TRITON_FUNCTIONS
from mtmc_lsp.llm.coder.coder import editable_code_of
from mtmc_lsp.llm.coder.prompts import KNOWLEDGE, coding_messages, knowledge
from mtmc_lsp.llm.prompting import OMITTED, trim_conversation


@pytest.mark.parametrize("kind", GRAPH_KINDS)
def test_every_kind_of_action_has_a_note_with_a_worked_example_and_its_source(kind: ActionKind) -> None:
    notes = knowledge(kind)
    for note in (*notes["kernels"], *notes["kind"]):
        assert note.count("\nSource") == 1
    assert "\nExample: " in notes["kind"][0]


def test_each_architecture_has_a_note_that_is_included_once() -> None:
    archs = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120", "gfx942", "gfx1100")
    heads = [note.partition("\n")[0].split()[1] for note in knowledge(ActionKind.AUTOTUNE, archs)["arch"]]
    assert heads == ["Turing", "Ampere", "Hopper", "Blackwell", "CDNA", "RDNA"]
    assert "CDNA" not in str(knowledge(ActionKind.AUTOTUNE, ("sm_90",)))


@pytest.mark.parametrize(
    ("operation", "head"),
    [
        ("convolution", "Convolutions"),
        ("conv_transpose3d", "Convolutions"),
        ("max_pool2d_with_indices", "Pooling"),
        ("adaptive_avg_pool2d", "Pooling"),
        ("avg_pool3d", "Pooling"),
        ("cumsum", "Scans"),
        ("logcumsumexp", "Scans"),
        ("addmm", "Matrix products"),
        ("topk", "Sorting and selecting"),
        ("nanmedian", "Sorting and selecting"),
        ("scatter_add", "Gathering and scattering"),
        ("_embedding_bag_forward_only", "Gathering and scattering"),
        ("scaled_dot_product_attention", "Attention"),
        ("relu", ""),
    ],
)
def test_operations_have_notes(operation: str, head: str) -> None:
    notes = knowledge(ActionKind.FUSE, operations=(operation, operation))["operations"]
    assert [note.partition("\n")[0].removeprefix("## ") for note in notes] == [head] * bool(head)


@pytest.mark.parametrize("note", sorted(KNOWLEDGE.glob("*.md")), ids=lambda path: path.stem)
def test_functions_in_a_note_exist_and_are_allowed(note: Path) -> None:
    text = note.read_text()
    assert text.count("\nSource") == 1
    for name in re.findall(r"\btl\.((?:\w+\.)*\w+)", text.replace("There is no `tl.tanh`", "")):
        assert operator.attrgetter(name)(tl), name
        assert set(name.split(".")[:-1]) <= TL_SUBMODULES, name
    for name in re.findall(r"\btriton\.(\w+)", text):
        assert name in TRITON_FUNCTIONS | {"jit"} or name == "autotune", name
    for name in re.findall(r"\btorch\.(\w+)\(", text.replace("torch.relu", "")):
        assert name in ALLOCATION, name


def test_a_prompt_omits_the_least_important_parts_until_it_fits(captured) -> None:
    capture = captured(SOURCE, "ranks")
    root = BuiltinCoder().start(capture, SOURCE)
    editable, action = (
        editable_code_of(capture, root),
        MacroAction(ActionKind.FUSE, ("cumsum",), (0, 0), text="fuse it"),
    )

    def prompt(max_tokens: int) -> str:
        return coding_messages(capture, root, action, editable, max_tokens=max_tokens, archs=("sm_90",))[1].content

    full_tokens = estimated_tokens([Message("user", prompt(10**6))])
    assert OMITTED not in prompt(10**6)
    notes = ("## General rules for kernels", "## Fuse", "## Scans", "## Hopper")
    included_notes = [
        tuple(note for note in notes if note in prompt(max_tokens)) for max_tokens in range(full_tokens + 800, 0, -20)
    ]
    assert list(dict.fromkeys(included_notes)) == [notes, notes[:3], notes[:2], notes[:1], ()]
    shortest = prompt(1)
    assert "## " not in shortest
    assert editable.text in shortest
    assert "def ranks(x):" in shortest


def test_questions_of_a_run_share_a_prefix_for_caching(captured) -> None:
    capture = captured(SOURCE, "ranks")
    root = BuiltinCoder().start(capture, SOURCE)
    first, second = (
        coding_messages(capture, root, MacroAction(*about), editable_code_of(capture, root), max_tokens=10**6)[
            1
        ].content
        for about in ((ActionKind.FUSE, ("sort",), (0, 0)), (ActionKind.AUTOTUNE, ("cumsum",), (0, 0)))
    )
    shared, kernels = first.index("# Step\n"), first.index("## General rules for kernels")
    assert first[:shared] == second[:shared]
    assert first[shared:] != second[shared:]
    assert kernels < shared


def test_a_long_conversation_drops_its_oldest_attempts() -> None:
    talk = [Message("user", f"{number} {'x' * 300}") for number in range(8)]
    assert trim_conversation(talk, 10**6) == talk
    assert [item.content[0] for item in trim_conversation(talk, 450)] == ["0", "1", "6", "7"]
    assert [item.content[0] for item in trim_conversation(talk, 1)] == ["0", "1", "6", "7"]
