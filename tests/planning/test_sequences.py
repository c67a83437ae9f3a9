"""Any sequence of proposed actions on a small graph gives correct and reproducible code."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.schedule.schedule import Schedule
from tests.codegen.harness import verified
from tests.planning.situations import schedule_of, situation, start

STATEMENTS = [
    "v = torch.tanh(v)",
    "v = v * 3.0 / 4.0",
    "v = (v + 1.0) - 0.25",
    "v = v.neg().neg() * 1",
    "v = v + x",
    "v = v * b",
    "v = v.t().t()",
    "v = torch.softmax(v, -1)",
    "v = v * torch.rsqrt((v * v).mean(1, keepdim=True) + 1.0)",
    "v = v + v.amax(0, keepdim=True)",
    "v = F.linear(torch.tanh(v), w, b)",
    "v = F.dropout(v, 0.5, training=False)",
]
RESULTS = [
    "v",
    "v.sum(0), v.sum(1)",
    "v.mean(1, keepdim=True) * 2.0",
    "v, v.sum()",
    "torch.relu(v).t()",
    "F.linear(v, w, b).mean(-1)",
]
MOST_ACTIONS = 5


@st.composite
def targets(draw: st.DrawFn) -> str:
    """A random target with a workload."""
    body = draw(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=5))
    rows, columns = draw(st.sampled_from([(6, 16), (20, 32), (33, 24)]))
    lines = ["v = x * 0.5", *body, f"return {draw(st.sampled_from(RESULTS))}"]
    return (
        "import torch\nimport torch.nn.functional as F\n"
        f"# mtmc: x=f32[N,M] w=f32[M,M] b=f32[M] N={rows} M={columns}\n"
        "def f(x, w, b):\n" + "".join(f"    {line}\n" for line in lines)
    )


def walk(capture: Capture, text: str, data: st.DataObject) -> Candidate:
    """A run that selects proposals at random, from ``data``."""
    candidate, coder, strict = start(capture, text), BuiltinCoder(), data.draw(st.booleans())
    for _ in range(MOST_ACTIONS):
        choices = proposals(situation(capture, candidate, has_gpu=True, strict=strict))
        if not choices:
            break
        action = choices[data.draw(st.integers(0, len(choices) - 1))]
        variants = action.params.get("variants")
        if isinstance(variants, (list, tuple)):
            chosen = variants[data.draw(st.integers(0, len(variants) - 1))]
            action = MacroAction(action.kind, action.region, action.lines, chosen)
        after = coder.write(capture, candidate, action)
        assert replayed(capture, candidate, action) == after
        candidate = after
    return candidate


def replayed(capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
    """The same step from its stored JSON."""
    stored = [json.loads(json.dumps(to_json(item))) for item in (candidate, action)]
    again = BuiltinCoder().write(capture, from_json(Candidate, stored[0]), from_json(MacroAction, stored[1]))
    return Candidate(again.id, again.parent, action, again.source, again.code, again.schedule, again.launches)


# Each case starts worker processes, so failing cases are not shrunk; the targets are already small.
SLOWLY = settings(
    deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


@settings(SLOWLY, max_examples=25)
@given(text=targets(), data=st.data())
def test_any_sequence_of_proposed_actions_gives_reproducible_code(captured, text: str, data: st.DataObject) -> None:
    capture = captured(text, "f")
    candidate = walk(capture, text, data)
    compile(candidate.source, "model.py", "exec")
    schedule = schedule_of(candidate)
    assert from_json(Schedule, to_json(schedule)) == schedule


@settings(SLOWLY, max_examples=8)
@given(text=targets(), data=st.data())
def test_any_sequence_of_proposed_actions_computes_what_the_user_wrote(
    captured, text: str, data: st.DataObject
) -> None:
    capture = captured(text, "f")
    candidate = walk(capture, text, data)
    if candidate.code is None:
        return
    verdict = verified(capture, candidate)
    assert verdict.is_correct, f"{verdict.reason}\n{candidate.source}"


def test_an_action_that_cannot_be_written_is_reported(captured) -> None:
    text = "import torch\n# mtmc: x=f32[N] N=8\ndef f(x):\n    return torch.sort(x * 2.0)[0]\n"
    capture = captured(text, "f")
    with pytest.raises(CannotCode, match="stays a torch call"):
        BuiltinCoder().write(
            capture, start(capture, text), MacroAction(ActionKind.FUSE, ("mul", "sort"), (0, 0), {"config": {}})
        )
