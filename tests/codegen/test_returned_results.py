"""Targets that return dictionaries, named tuples, dataclasses, plain values next to tensors, or nothing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

RETURNED = {
    "a dictionary": ('{"loss": y.mean(), "logits": y}', "{'loss': f_results[0], 'logits': f_results[1]}"),
    "of one result": ('{"loss": y.mean()}', "{'loss': f_results[0]}"),
    "states beside the output": ("y, (y.sum(-1), [y.amax(-1)])", "(f_results[0], (f_results[1], [f_results[2]]))"),
    "a list of dictionaries": ("[{0: y}, {1: y * 2.0}]", "[{0: f_results[0]}, {1: f_results[1]}]"),
    "no loss without labels": ('{"loss": None, "logits": y}', "{'loss': None, 'logits': f_results[0]}"),
    "no state": ("y, None, [y.sum(-1)]", "(f_results[0], None, [f_results[1]])"),
    "nothing behind": ("y, None", "(f_results[0], None)"),
    "the same twice": ('{"a": y, "b": y}', "{'a': f_results[0], 'b': f_results[1]}"),
    "plain values": ('{"y": y, "mode": "train", "scale": 0.5}', "{'y': f_results[0], 'mode': 'train', 'scale': 0.5}"),
    "numbers of elements": ("y, x.shape[0] * 3, x.numel()", "(f_results[0], 3 * x.shape[0], x.shape[1] * x.shape[0])"),
    "a shape": ("y, x.shape", "(f_results[0], torch.Size((x.shape[0], x.shape[1])))"),
    "a named tuple": ("Found(y, y.sum(-1))", "Found(f_results[0], f_results[1])"),
    "a dataclass": ("Output(loss=y.mean())", "Output(loss=f_results[0], states=None)"),
    "a dataclass of them": ("[Output(y, Found(y, 3))]", "[Output(loss=f_results[0], states=Found(f_results[1], 3))]"),
    "an ordered dictionary": ("OrderedDict(y=y)", "OrderedDict({'y': f_results[0]})"),
    "what torch names": ("torch.max(y, -1)", "torch.return_types.max((f_results[0], f_results[1]))"),
}


def text_of(returned: str) -> str:
    return f"""import torch
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
Found = namedtuple("Found", "y total")
@dataclass
class Output:
    loss: object
    states: object = None
class Kept(list):
    pass
# mtmc: x=f32[M,D] w=f32[D] M=6 D=20
def f(x, w):
    y = torch.softmax(x * w, -1)
    return {returned}
"""


@pytest.mark.parametrize("name", RETURNED)
def test_results_keep_their_structure(name: str, captured) -> None:
    returned, expected = RETURNED[name]
    text = text_of(returned)
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    assert f"        return {expected}\n" in candidate.source
    assert verified(capture, candidate).reason == ""


@pytest.mark.parametrize(
    ("returned", "wrong", "right"),
    [
        ("a dictionary", "'loss': f_results", "'cost': f_results"),
        ("a dictionary", "f_results[0], 'l", "f_results[1], 'l"),
        ("a named tuple", "return Found(f_results[0], f_results[1])", "return (f_results[0], f_results[1])"),
        ("plain values", "0.5}", "0.25}"),
        ("numbers of elements", "3 * x.shape[0]", "18"),
    ],
)
def test_another_structure_is_incorrect(returned: str, wrong: str, right: str, captured) -> None:
    text = text_of(RETURNED[returned][0])
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    assert wrong in candidate.source
    assert verified(capture, replace(candidate, source=candidate.source.replace(wrong, right))).reason != ""


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ('{"y": y, "on": x.device}', "f returns a dict with a device in it, which cannot be verified"),
        ("{(1, 2): y}", "f returns a dict with keys that are neither strings nor integers, which cannot be verified"),
        ("Kept([y])", "f returns a Kept, which cannot be verified"),
        ("namedtuple('Here', 'y')(y)", "f returns a Here, which its file does not name, which cannot be verified"),
    ],
)
def test_refusals_name_structures_that_cannot_be_rebuilt(returned: str, message: str, captured) -> None:
    with pytest.raises(TargetUnsupported, match=message):
        captured(text_of(returned), "f")


IN_PLACE = """import torch
# mtmc: p=f32[N] g=f32[N] m=f32[N] N=40
def step(p, g, m) -> None:
    m.mul_(0.9).add_(g, alpha=0.1)
    p.add_(m, alpha=-0.01)
"""


def test_a_function_that_only_updates_its_arguments_is_verified_on_them(captured) -> None:
    capture = captured(IN_PLACE, "step")
    assert (capture.graph.outputs, capture.graph.returns) == ((), "None")
    candidate = fully_fused(capture, start(capture, IN_PLACE))
    assert "(p, g, m)\n        return None\n" in candidate.source
    assert verified(capture, candidate).reason == ""
    own, kernels, launcher = re.split(r"(?=# mtmc: begin|def step_fits)", candidate.source, maxsplit=2)
    assert "0.9" in kernels
    wrong = f"{own}{kernels.replace('0.9', '0.8')}{launcher}"
    assert "input m afterwards" in verified(capture, replace(candidate, source=wrong)).reason


def test_a_function_without_results_and_updates_is_refused(captured) -> None:
    with pytest.raises(TargetUnsupported, match="step has no tensor operations"):
        captured(IN_PLACE.replace("mul_", "mul").replace("p.add_", "p.add"), "step")


def test_a_result_instead_of_none_is_incorrect(captured) -> None:
    text = text_of(RETURNED["no state"][0])
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    for wrong in ("(f_results[0], f_results[1], [None])", "(f_results[0], f_results[0], [f_results[1]])"):
        source = candidate.source.replace(RETURNED["no state"][1], wrong)
        assert source != candidate.source
        assert verified(capture, replace(candidate, source=source)).reason != ""


def test_dictionary_keys_of_custom_classes_are_refused(captured) -> None:
    text = text_of("{Name.LOSS: y}").replace(
        "# mtmc", 'import enum\nclass Name(str, enum.Enum):\n    LOSS = "loss"\n# mtmc'
    )
    with pytest.raises(TargetUnsupported, match="f returns a dict with keys that are neither strings nor integers"):
        captured(text, "f")
