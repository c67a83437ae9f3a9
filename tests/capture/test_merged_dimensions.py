"""Views that merge dimensions leave the sizes free; equalities of products become conditions or equal sizes."""

from __future__ import annotations

import pytest

HEAD = "import torch\nimport torch.nn.functional as F\n\n\n"
NAMED = "# mtmc: logits=f32[B,S,V] labels=i64[B,S]@0..V-1 B=2 S=20 V=50\n"
UNNAMED = "# mtmc: logits=f32[2,20,50] labels=i64[2,20]@0..49\n"
LOSSES = {
    "reshape": "return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-100)",
    "view": "return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))",
    "next token": (
        "logits, labels = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()\n"
        "    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))"
    ),
}


@pytest.mark.parametrize("directive", [NAMED, UNNAMED], ids=["named", "unnamed"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_token_loss_is_captured_for_all_batches_lengths_and_vocabularies(name: str, directive: str, captured) -> None:
    graph = captured(f"{HEAD}{directive}def f(logits, labels):\n    {LOSSES[name]}\n", "f").graph
    logits, labels = ([str(size) for size in item.type.shape] for item in graph.inputs)
    assert all(size.isidentifier() for size in logits)
    assert labels == logits[:2], "the labels have the sizes of the logits"
    assert not [text for text in graph.conditions if "==" in text]


def test_an_equality_of_other_sizes_is_a_condition(captured) -> None:
    """Without it, the kernel would read past the end of the labels."""
    directive = NAMED.replace("labels=i64[B,S]", "labels=i64[N,M]").replace("V=50", "V=50 N=5 M=8")
    graph = captured(f"{HEAD}{directive}def f(logits, labels):\n    {LOSSES['view']}\n", "f").graph
    assert "B * S == M * N" in graph.conditions


@pytest.mark.parametrize(
    "body", ["x.reshape(-1, x.size(-1)) * 2", "x.flatten(0, 1).relu()", "x.view(-1, *x.shape[2:]) + 1"]
)
def test_merged_rows_have_free_sizes(body: str, captured) -> None:
    graph = captured(f"{HEAD}# mtmc: x=f32[4,6,8]\ndef f(x):\n    return {body}\n", "f").graph
    assert len(graph.sizes) == 3
    assert [str(stride) for stride in graph.nodes[-1].type.stride] == ["s2", "1"]
