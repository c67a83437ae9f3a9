"""A candidate that keeps state between calls is refused wherever it keeps it, and an honest module with state is accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from handwritten import Handwritten
from pairs import MODEL, MODEL_NEW, changed

from mtmc_lsp.core.results import Verdict, VerdictStatus

BODY = "        return torch.relu(x * self.gain) * 3 + 1\n"
OWN = f"""

# mtmc: x=f32[N,D] init: width=24 N=13 D=24
class Scaled(torch.nn.Module):
    def __init__(self, width: int = 24):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
{BODY}"""
BLOCK = """

@triton.jit
def scaled_kernel(x_ptr, gain_ptr, out_ptr, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    x = tl.load(x_ptr + at, mask=mask) * tl.load(gain_ptr + at % width, mask=mask)
    tl.store(out_ptr + at, tl.where(x > 0, x, tl.where(x == x, 0.0, x)) * 3 + 1, mask=mask)


def scaled_fits(x, gain):
    tensors = (x, gain)
    return (
        all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and x.ndim == 2
        and x.numel() > 0
    )


def scaled_triton(x, gain):
    out = torch.empty_like(x)
    scaled_kernel[(triton.cdiv(x.numel(), 128),)](x, gain, out, x.numel(), x.shape[1], BLOCK=128)
    return out
"""
CALL = "scaled_triton(x, self.gain)"
DISPATCH = f"        if scaled_fits(x, self.gain):\n            return {CALL}\n"
SCALED = Handwritten("Scaled", OWN, BLOCK, DISPATCH, BODY)

CACHED = "{where}.setdefault((x.data_ptr(), x.shape), {result}).clone()"
"""Results by the address and the shape of the input."""
COUNTED = "({where}.append(0) or ({result} if len({where}) < 4 else {result} * 0))"
"""Right in the first three calls only."""
KEEPERS: dict[str, tuple[str, str, str]] = {
    "instance": ("self.state", "", "        self.state = {empty}\n"),
    "class attribute": ("type(self).state", "", "        type(self).state = getattr(type(self), 'state', {empty})\n"),
    "closure": ("closed()", "def closing():\n    state = {empty}\n    return lambda: state\n\n\nclosed = closing()\n\n\n", ""),
    "default argument": ("default()", "def default(state={empty}):\n    return state\n\n\n", ""),
    "function attribute": ("default.state", "def default():\n    pass\n\n\ndefault.state = {empty}\n\n\n", ""),
    "global": ("STATE", "STATE = {empty}\n\n\n", ""),
}  # fmt: skip
"""For each place: its expression, lines above the class, and lines of the constructor."""
BUFFERS = {
    "results in a buffer": (
        "        self.register_buffer('last', torch.zeros(0), persistent=False)\n",
        "(self._buffers.update(last={result}) if self.last.shape != x.shape else None) or self.last.clone()",
    ),
    "a count in a buffer": (
        "        self.register_buffer('calls', torch.zeros(()))\n",
        "{result} * (self.calls.add_(1) < 4)",
    ),
}
REFUSED = (VerdictStatus.INCORRECT, VerdictStatus.RUNTIME_ERROR)


def kept_state(place: str, what: str) -> tuple[str, str, str]:
    """Lines above the class, lines of the constructor, and the expression that replaces the result."""
    if place == "buffer":
        constructor, expression = BUFFERS[what]
        return "", constructor, expression
    where, above, constructor = KEEPERS[place]
    empty = "{}" if what == "cache" else "[]"
    expression = CACHED if what == "cache" else COUNTED
    return above.replace("{empty}", empty), constructor.replace("{empty}", empty), expression.replace("{where}", where)


WAYS = [(place, what) for place in KEEPERS for what in ("cache", "count")] + [("buffer", what) for what in BUFFERS]


def version(place: str, what: str) -> tuple[tuple[str, str], ...]:
    above, constructor, expression = kept_state(place, what)
    changes = [(CALL, expression.replace("{result}", CALL)), ("@triton.jit", f"{above}@triton.jit")]
    return (*changes, ("        super().__init__()\n", f"        super().__init__()\n{constructor}"))


@pytest.mark.parametrize(("place", "what"), WAYS)
def test_a_version_that_keeps_state_is_refused(place: str, what: str, measurer_of) -> None:
    verdict = measurer_of(SCALED).verify(SCALED.candidate(*version(place, what)))
    assert verdict.status in REFUSED, verdict


@pytest.mark.parametrize(("place", "what"), WAYS)
def test_a_foreign_candidate_that_keeps_state_is_refused(place: str, what: str, judge: Callable[..., Verdict]) -> None:
    above, constructor, expression = kept_state(place, what)
    text = changed(
        MODEL_NEW,
        ("class ModelNew", f"{above}class ModelNew"),
        ("        super().__init__()\n", f"        super().__init__()\n{constructor}"),
        ("        return out\n", f"        return {expression.replace('{result}', 'out')}\n"),
    )
    verdict = judge(MODEL, "Model", text, "ModelNew")
    assert verdict.status in REFUSED, verdict


def test_the_same_version_without_state_is_accepted(measurer_of) -> None:
    verdict = measurer_of(SCALED).verify(SCALED.candidate())
    assert verdict.is_correct, verdict.reason
    assert {"many calls", "kernel's result used", "no threads left", "text: imports"} <= {
        c.name for c in verdict.checks
    }


ABOVE = "class ModelNew"
INIT = "        super().__init__()\n"
RETURN = "        return out\n"
ROW = "x.flatten()[0].item() if x.numel() else 0"
TRICKS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "a result in a buffer that the next call uses": (
        "a later call changes the results of an earlier one",
        ((ABOVE, "BUFFERS = {}\n\n\nclass ModelNew"), (RETURN, "        return BUFFERS.setdefault(x.shape, torch.empty_like(out)).copy_(out)\n"))),
    "one of four buffers in turn": (
        "a later call changes the results of an earlier one",
        ((ABOVE, "BUFFERS = []\n\n\nclass ModelNew"),
         (RETURN, "        BUFFERS.append(BUFFERS[-4] if len(BUFFERS) > 3 and BUFFERS[-4].shape == out.shape else torch.empty_like(out))\n"
                  "        return BUFFERS[-1].copy_(out)\n"))),
    "a result that is kept for equal inputs": (
        "writing into an earlier result changes later results",
        ((ABOVE, "KEPT = []\n\n\nclass ModelNew"),
         (RETURN, "        for inputs, result in KEPT:\n            if x.numel() < 100 and inputs.shape == x.shape and inputs.eq(x).all():\n                return result\n"
                  "        KEPT.append((x.clone(), out))\n        return out\n"))),
    "a weight of another instance": (
        "",
        ((RETURN, "        type(self).first = getattr(type(self), 'first', self)\n        return out if type(self).first is self else out * 2\n"),)),
    "the last weight that was set": (
        "the results change when another instance with other parameters was called",
        ((INIT, INIT + "        self.state = None\n"),
         ("            x, self.weight,", "            x, self.kept(),"),
         ("    def forward", "    def kept(self):\n        if self.state is None:\n            self.state = True\n            type(self).last = self.weight\n"
                            "        return type(self).last\n\n    def forward"))),
    "a second instance": (
        "", ((INIT, INIT + "        NUMBERS.append(0)\n        self.number = len(NUMBERS)\n"), (ABOVE, "NUMBERS = []\n\n\nclass ModelNew"),
             (RETURN, "        return out if len(NUMBERS) < 2 or self.number > 1 else out * 2\n"))),
    "the first element": ("", ((RETURN, f"        return out * 2 if 0.3 < ({ROW}) < 0.4 else out\n"),)),
    "a sum": ("", ((RETURN, "        return out * 2 if int(x.sum() * 1000) % 9 == 4 else out\n"),)),
    "a count in an object": (
        "the results change when COUNTER.calls is as after many calls",
        ((ABOVE, "class Counter:\n    calls = 0\n\n\nCOUNTER = Counter()\n\n\nclass ModelNew"),
         (RETURN, "        COUNTER.calls += 1\n        return out if COUNTER.calls < 5000 else out * 2\n"))),
    "a count in an object in a dictionary": (
        "the results change when COUNTERS[0].inner.calls is as after many calls",
        ((ABOVE, "class Counter:\n    pass\n\n\nCOUNTERS = {'first': Counter()}\nCOUNTERS['first'].inner = Counter()\n"
                 "COUNTERS['first'].inner.calls = 0\n\n\nclass ModelNew"),
         (RETURN, "        inner = COUNTERS['first'].inner\n        inner.calls += 1\n        return out if inner.calls < 5000 else out * 2\n"))),
    "a count in a tensor": (
        "the results change when CALLS is as after many calls",
        ((ABOVE, "CALLS = torch.zeros(1)\n\n\nclass ModelNew"), (RETURN, "        CALLS.add_(1)\n        return out if float(CALLS) < 5000 else out * 2\n"))),
    "an iterator that counts": (
        "the results change when CALLS is as after many calls",
        ((ABOVE, "import itertools\n\nCALLS = itertools.count()\n\n\nclass ModelNew"), (RETURN, "        return out if next(CALLS) < 5000 else out * 2\n"))),
    "a generator that counts": (
        "the results change when CALLS is as after many calls",
        ((ABOVE, "def numbers():\n    n = 0\n    while True:\n        n += 1\n        yield n\n\n\nCALLS = numbers()\n\n\nclass ModelNew"),
         (RETURN, "        return out if next(CALLS) < 5000 else out * 2\n"))),
    "an iterator in a list": (
        "the results change when CALLS is as after many calls",
        ((ABOVE, "CALLS = [iter(range(5000))]\n\n\nclass ModelNew"), (RETURN, "        return out if next(CALLS[0], None) is not None else out * 2\n"))),
    "rare numbers by a seed": (
        "the results change when LUCK is as after many calls",
        ((ABOVE, "import random\n\nLUCK = random.Random(3)\n\n\nclass ModelNew"), (RETURN, "        return out if LUCK.random() < 0.9999 else out * 2\n"))),
    "rare whole numbers by a seed": (
        "the results change when LUCK is as after many calls",
        ((ABOVE, "import random\n\nLUCK = random.Random(3)\n\n\nclass ModelNew"), (RETURN, "        return out * 2 if LUCK.randint(1, 5000) == 1 else out\n"))),
    "a count in the module": (
        "the results change when self.calls is as after many calls",
        ((INIT, INIT + "        self.calls = 0\n"), (RETURN, "        self.calls += 1\n        return out if self.calls < 5000 else out * 2\n"))),
    "shapes that were seen": (
        "the results change when SEEN is as after many calls",
        ((ABOVE, "SEEN = set()\n\n\nclass ModelNew"),
         (RETURN, "        SEEN.add((*x.shape, out.data_ptr()))\n        return out if len(SEEN) < 5000 else out * 2\n"))),
    "a memory for many results": (
        "a later call changes the results of an earlier one",
        ((ABOVE, "ARENA = torch.empty(1 << 13)\nUSED = [0]\n\n\nclass ModelNew"),
         (RETURN, "        USED[0] = 0 if USED[0] + out.numel() > len(ARENA) else USED[0]\n        USED[0] += out.numel()\n"
                  "        return ARENA[USED[0] - out.numel() : USED[0]].view(out.shape).copy_(out)\n"))),
    "addresses that were seen": (
        "the results change when SEEN is as after many calls",
        ((ABOVE, "SEEN = set()\n\n\nclass ModelNew"), (RETURN, "        SEEN.add(out.data_ptr())\n        return out if len(SEEN) < 5000 else out * 2\n"))),
}  # fmt: skip
"""For each candidate: the reason of its refusal, and changes of the honest one."""


@pytest.mark.parametrize("what", TRICKS)
def test_a_foreign_module_whose_calls_disturb_each_other_is_refused(what: str, judge: Callable[..., Verdict]) -> None:
    reason, changes = TRICKS[what]
    verdict = judge(MODEL, "Model", changed(MODEL_NEW, *changes), "ModelNew")
    assert verdict.status in REFUSED, verdict
    assert reason in verdict.reason


HONEST = {
    "a workspace that leaks into no result": (
        "        self.workspaces = {}\n",
        "        self.workspaces.setdefault(x.shape, torch.empty_like(x)).copy_(x)\n",
    ),
    "a check of its values": ("", "        if bool(torch.isnan(x.sum())):\n            print('NaN')\n"),
    "a count that changes no result": ("        self.calls = 0\n", "        self.calls += 1\n"),
    "names in turn": (
        "        import itertools\n\n        self.names = itertools.cycle('ab')\n",
        "        self.name = next(self.names)\n",
    ),
    "numbers of the system that change no result": (
        "        import random\n\n        self.random = random.SystemRandom()\n",
        "        self.random.random()\n",
    ),
    "numbers by a seed that change no result": (
        "        import random\n\n        self.random = random.Random(3)\n",
        "        if self.random.random() < 0.01:\n            print('rare')\n",
    ),
    "a table that depends on the width alone": (
        "        self.tables = {}\n",
        "        self.tables.setdefault(x.shape[1], torch.arange(x.shape[1]))\n",
    ),
}


@pytest.mark.parametrize("what", HONEST)
def test_a_foreign_module_with_harmless_state_is_accepted(what: str, judge: Callable[..., Verdict]) -> None:
    constructor, forward = HONEST[what]
    text = changed(
        MODEL_NEW,
        ("        super().__init__()\n", f"        super().__init__()\n{constructor}"),
        ("        x = x.contiguous()\n", f"{forward}        x = x.contiguous()\n"),
    )
    verdict = judge(MODEL, "Model", text, "ModelNew")
    assert verdict.is_correct, verdict.reason


def test_results_in_a_memory_that_is_replaced_when_it_is_used_up_are_accepted(judge: Callable[..., Verdict]) -> None:
    placed = (
        "        if USED[0] + out.numel() > len(MEMORY[0]):\n"
        "            USED[0], MEMORY[0] = 0, torch.empty(out.numel() + 2000)\n"
        "        USED[0] += out.numel()\n"
        "        return MEMORY[0][USED[0] - out.numel() : USED[0]].view(out.shape).copy_(out)\n"
    )
    above = "MEMORY = [torch.empty(2000)]\nUSED = [0]\n\n\nclass ModelNew"
    verdict = judge(MODEL, "Model", changed(MODEL_NEW, (ABOVE, above), (RETURN, placed)), "ModelNew")
    assert verdict.is_correct, verdict.reason


TRAINED = """

# mtmc: x=f32[N,8] N=16
class Trained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.steps = torch.nn.Buffer(torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)
        y = F.batch_norm(x, self.norm.running_mean, self.norm.running_var, None, None, True, 0.1)
        return torch.relu(y) * 2
"""
TRAINED_BLOCK = """

@triton.jit
def relu_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count)
    tl.store(out_ptr + at, tl.where(x > 0, x, tl.where(x == x, 0.0, x)) * 2, mask=at < count)


def doubled_relu(y):
    if not (y.is_cuda and y.is_contiguous() and y.dtype == torch.float32 and y.numel()) or y.requires_grad:
        return 2 * torch.relu(y)
    out = torch.empty_like(y)
    relu_kernel[(triton.cdiv(y.numel(), 64),)](y, out, y.numel(), BLOCK=64)
    return out
"""


def test_batch_norm_in_training_and_a_counter_of_the_reference_are_accepted(measurer_of) -> None:
    """Both change the module's buffers in every call, in the user's code as in the version."""
    target = Handwritten("Trained", TRAINED, TRAINED_BLOCK, "", "        return torch.relu(y) * 2\n")
    replaced = ("        return torch.relu(y) * 2\n", "        return doubled_relu(y)\n")
    verdict = measurer_of(target).verify(target.candidate(replaced))
    assert verdict.is_correct, verdict.reason


def test_a_version_that_skips_the_running_statistics_is_refused(measurer_of) -> None:
    target = Handwritten("Trained", TRAINED, TRAINED_BLOCK, "", "        return torch.relu(y) * 2\n")
    replaced = ("        return torch.relu(y) * 2\n", "        return doubled_relu(y)\n")
    skips = ("self.norm.running_mean, self.norm.running_var,", "None, None,")
    verdict = measurer_of(target).verify(target.candidate(replaced, skips))
    assert verdict.status is VerdictStatus.INCORRECT, verdict
    assert "afterwards" in verdict.reason
