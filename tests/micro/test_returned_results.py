"""Targets that return dictionaries, and tuples and lists one inside another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from tests.macro.situations import fused_as_far_as_it_goes, start
from tests.micro.harness import verified

RETURNED = {
    "a dictionary": ('{"loss": y.mean(), "logits": y}', "{'loss': f_results[0], 'logits': f_results[1]}"),
    "of one result": ('{"loss": y.mean()}', "{'loss': f_results[0]}"),
    "states beside the output": ("y, (y.sum(-1), [y.amax(-1)])", "(f_results[0], (f_results[1], [f_results[2]]))"),
    "a list of dictionaries": ("[{0: y}, {1: y * 2.0}]", "[{0: f_results[0]}, {1: f_results[1]}]"),
    "no loss without labels": ('{"loss": None, "logits": y}', "{'loss': None, 'logits': f_results[0]}"),
    "no state": ("y, None, [y.sum(-1)]", "(f_results[0], None, [f_results[1]])"),
    "nothing behind": ("y, None", "(f_results[0], None)"),
    "the same twice": ('{"a": y, "b": y}', "{'a': f_results[0], 'b': f_results[1]}"),
}


def text_of(returned: str) -> str:
    return f"""import torch
# mtmc: x=f32[M,D] w=f32[D] M=6 D=20
def f(x, w):
    y = torch.softmax(x * w, -1)
    return {returned}
"""


@pytest.mark.parametrize("name", RETURNED)
def test_results_come_back_as_they_are_returned(name: str, captured) -> None:
    returned, expected = RETURNED[name]
    text = text_of(returned)
    capture = captured(text, "f")
    candidate = fused_as_far_as_it_goes(capture, start(capture, text))
    assert f"        return {expected}\n" in candidate.source
    assert verified(capture, candidate).reason == ""


@pytest.mark.parametrize(
    ("wrong", "right"), [("'loss': f_results", "'cost': f_results"), ("f_results[0], 'l", "f_results[1], 'l")]
)
def test_another_form_is_not_correct(wrong: str, right: str, captured) -> None:
    text = text_of(RETURNED["a dictionary"][0])
    capture = captured(text, "f")
    candidate = fused_as_far_as_it_goes(capture, start(capture, text))
    assert wrong in candidate.source
    assert verified(capture, replace(candidate, source=candidate.source.replace(wrong, right))).reason != ""


def test_a_result_for_none_is_not_correct(captured) -> None:
    text = text_of(RETURNED["no state"][0])
    capture = captured(text, "f")
    candidate = fused_as_far_as_it_goes(capture, start(capture, text))
    for wrong in ("(f_results[0], f_results[1], [None])", "(f_results[0], f_results[0], [f_results[1]])"):
        source = candidate.source.replace(RETURNED["no state"][1], wrong)
        assert source != candidate.source
        assert verified(capture, replace(candidate, source=source)).reason != ""


def test_keys_of_classes_of_their_own_are_refused(captured) -> None:
    text = text_of("{Name.LOSS: y}").replace(
        "# mtmc", 'import enum\nclass Name(str, enum.Enum):\n    LOSS = "loss"\n# mtmc'
    )
    with pytest.raises(TargetUnsupported, match="f returns a dict, which cannot be verified"):
        captured(text, "f")


def test_what_is_no_tensor_is_named(captured) -> None:
    with pytest.raises(TargetUnsupported, match="f returns a dict with a str in it, which cannot be verified"):
        captured(text_of('{"y": y, "mode": "train"}'), "f")
    with pytest.raises(TargetUnsupported, match="f returns a dict, which cannot be verified"):
        captured(text_of("{(1, 2): y}"), "f")
