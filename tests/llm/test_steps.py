"""Valid and invalid answers in a search with a real capture and a real endpoint. Only the measurer is fake."""

from __future__ import annotations

from typing import Any

import pytest
from answers import KERNEL, LAUNCH, SOURCE, body, editable_text, good, good_complete_text, good_diff, hunk
from endpoint import Endpoint, Fault
from searching import AgreeingMeasurer

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.core.chat import ModelNotUsable
from mtmc_lsp.core.run import StepStatus
from mtmc_lsp.llm.coder.hunks import HUNK_FORMAT


@pytest.mark.parametrize("answer", [good, good_complete_text, good_diff])
def test_hunks_complete_text_and_diff_give_the_same_code(run, answer) -> None:
    result = run(Endpoint(answer))
    assert result.steps[0].status is StepStatus.ACCEPTED, result.steps[0].reason
    assert result.final.source == run(Endpoint(good)).final.source


def changed(old: str, new: str):
    """The correct answer with a change."""

    def answer(request: dict[str, Any]) -> str:
        text = good(request)
        assert old in text
        return text.replace(old, new)

    return answer


STORE = "    tl.store("
OUT = "    out = torch.empty_like(x)\n"
FAILURES = {
    "empty answer": ("", "The answer is empty"),
    "prose only": ("I am sorry, but I cannot do that.", "contains no code"),
    "huge answer": (" ".join(str(number) for number in range(20_000)), "far more than one step needs"),
    "code of something else": ("```python\ndef other(): pass\n```", "does not define ranks_launch"),
    "wrong context": (
        lambda r: good(r).replace(body(editable_text(r)), "    return sorted(x)\n"),
        "no line 'return sorted(x)'",
    ),
    "edit of the user's function": (hunk("def ranks(x):\n", "def ranks(x, y):\n"), "SEARCH lines are not in the text"),
    "unfinished hunk": (lambda r: good(r)[: -len(">>>>>>> REPLACE\n")], "A hunk is incomplete"),
    "hunk without middle": ("<<<<<<< SEARCH\na\n>>>>>>> REPLACE\n", "A hunk is incomplete"),
    "block without end": (lambda r: good_complete_text(r).removesuffix("```"), "The code block is not closed"),
    "goes in circles": (hunk("", "a = 1\n" * 20_000), "repeated itself"),
    "two answers": (lambda r: good_complete_text(r) + "\nor\n" + good_complete_text(r), "two versions"),
    "does not parse": (changed(STORE, "    tl.store(("), "does not parse"),
    "no launch": (lambda r: hunk("", KERNEL), "launches no kernel"),
    "launcher gone": (
        lambda r: f"```python\n{KERNEL}\n# def\ndef ranks_launch(x): pass\n```".replace("(x): p", "(y): p"),
        "must keep",
    ),
    "parameter added": (
        lambda r: good_complete_text(r).replace("ranks_launch(x)", "ranks_launch(x, cache={})"),
        "has no parameters other than",
    ),
    "hidden fallback": (
        changed(OUT, "    try:\n        out = torch.empty_like(x)\n    except Exception:\n        pass\n"),
        "try/except",
    ),
    "torch computes something else": (changed(OUT, "    out = torch.exp(x)\n"), "torch is only for allocation"),
    "torch computes": (changed(OUT, "    out = torch.cumsum(x, -1)\n"), "still contains torch calls of the region"),
    "a method computes": (changed(OUT, "    out = x.sort().values\n"), "not an allocation, size or view"),
    "operator computes": (
        changed(OUT, OUT + "    return torch.mul(out, 2)\n"),
        "still contains torch calls of the region",
    ),
    "torch calls stay": (
        lambda r: good(r).replace(LAUNCH, LAUNCH.replace("    return out\n", body(editable_text(r)))),
        "still contains",
    ),
    "global cache": (changed("@triton.jit\ndef ranks", "CACHE = {}\n\n\n@triton.jit\ndef ranks"), "only functions"),
    "global state": (changed(OUT, "    global seen\n" + OUT), "state may be kept between calls"),
    "import": (changed("@triton.jit\ndef ranks", "import os\n\n\n@triton.jit\ndef ranks"), "only functions"),
    "import inside": (changed(OUT, "    import os\n" + OUT), "imports are added automatically"),
    "reads a file": (changed(OUT, "    open('/etc/passwd')\n" + OUT), "open may not be called"),
    "private names": (changed(OUT, "    x.__class__\n" + OUT), "no private names"),
    "loads code": (changed(OUT, "    torch.load('w')\n" + OUT), "torch is only for allocation"),
    "unknown name": (changed("n_cols, BLOCK=tr", "n_columns, BLOCK=tr"), "n_columns is not defined"),
    "unknown kernel": (changed("    ranks_kernel[", "    rank_kernel["), "rank_kernel is not defined"),
    "defined twice": (lambda r: good(r).replace(KERNEL, f"{KERNEL}\n\n{KERNEL}"), "defined twice"),
    "autotune": (
        changed("@triton.jit\n", "@triton.autotune([], key=[])\n@triton.jit\n"),
        "only @triton.jit, nothing else",
    ),
    "missing mask": (changed(', mask=mask, other=float("inf")', ""), "unmasked-access"),
    "a block that is no power of two": (changed("tl.arange(0, BLOCK)", "tl.arange(0, 48)"), "arange-bound"),
    "guard rewritten": (
        changed("@triton.jit\ndef ranks", "def ranks_fits(x):\n    return False\n\n\n@triton.jit\ndef ranks"),
        "outside this text",
    ),
}


SHAPELESS = ("prose only", "block without end", "goes in circles", "unfinished hunk", "hunk without middle")


@pytest.mark.parametrize("name", FAILURES)
def test_an_invalid_answer_is_rejected_before_it_runs_and_repaired(run, name: str) -> None:
    answer, reason = FAILURES[name]
    endpoint, measurer = Endpoint(answer, good), AgreeingMeasurer()
    result = run(endpoint, measurer=measurer, context_tokens=100_000, answer_tokens=50_000)
    assert result.steps[0].status is StepStatus.ACCEPTED, result.steps[0].reason
    assert len(measurer.seen) == 1, "what breaks a rule is never run"
    told = str(endpoint.requests[1]["messages"][-1]["content"])
    assert reason in told
    assert (HUNK_FORMAT in told) == (name in SHAPELESS), "a model that wrote no hunk is shown one"


def test_verification_failures_are_sent_to_the_model(run) -> None:
    endpoint = Endpoint(changed("* 2, mask", "* 3, mask"), good)
    measurer = AgreeingMeasurer(**{"* 3, mask": "values: relative error 0.5"})
    result = run(endpoint, measurer=measurer)
    assert result.steps[0].status is StepStatus.ACCEPTED
    assert "values: relative error 0.5" in str(endpoint.requests[1]["messages"][-1]["content"])
    assert len(measurer.seen) == 2


def test_the_same_code_is_never_run_twice_and_the_last_accepted_version_remains(run) -> None:
    endpoint, measurer = Endpoint(good), AgreeingMeasurer(**{"ranks_kernel": "values: relative error 0.5"})
    result = run(endpoint, measurer=measurer, repairs=2)
    assert result.steps[0].status is StepStatus.FAILED
    assert "same code as before. values: relative error 0.5 (after 2 repairs)" in result.steps[0].reason
    assert len(measurer.seen) == 1
    assert len(endpoint.requests) == 3
    assert result.final.source == SOURCE


def test_of_several_answers_the_best_that_verifies_wins_and_the_same_code_is_verified_once(run) -> None:
    def commented(request: dict[str, Any]) -> str:
        return good(request).replace("    s = tl.sort(x)", "    # ascending\n    s = tl.sort(x)")

    wrong, spilling = changed("* 2, mask", "* 3, mask"), changed("num_warps=4", "num_warps=1")
    endpoint = Endpoint("no code", wrong, spilling, good, commented)
    measurer = AgreeingMeasurer(**{"* 3, mask": "values: relative error 0.5"})
    measurer.spills = {"num_warps=1": 64}
    result = run(endpoint, measurer=measurer, samples=5)
    step = result.steps[0]
    assert step.status is StepStatus.ACCEPTED
    assert step.reason.endswith("the best of 3 versions, 2 of them correct")
    assert "num_warps=4" in step.candidate.source
    assert len(measurer.seen) == len(set(measurer.seen)) == 3
    assert len(endpoint.requests) == 5, "nothing had to be mended"


def test_if_all_answers_fail_the_most_advanced_one_is_repaired(run) -> None:
    endpoint = Endpoint("no code", changed("* 2, mask", "* 3, mask"), good)
    measurer = AgreeingMeasurer(**{"* 3, mask": "values: relative error 0.5"})
    result = run(endpoint, measurer=measurer, samples=2)
    assert result.steps[0].status is StepStatus.ACCEPTED
    assert "values: relative error 0.5" in str(endpoint.requests[2]["messages"][-1]["content"])


def test_after_a_cut_answer_the_model_is_asked_to_be_brief(run) -> None:
    more = "".join(f"# more {number}\n" for number in range(500))
    endpoint = Endpoint(lambda request: good(request) + more, good)
    assert run(endpoint, answer_tokens=400).steps[0].status is StepStatus.ACCEPTED
    endpoint = Endpoint(lambda request: hunk("", more), good)
    assert run(endpoint, answer_tokens=400).steps[0].status is StepStatus.ACCEPTED
    assert "Be brief" in str(endpoint.requests[1]["messages"][-1]["content"])


def test_a_failed_request_fails_only_its_step(run) -> None:
    result = run(Endpoint(Fault(500, "oops"), good), steps=2)
    assert [step.status for step in result.steps] == [StepStatus.FAILED, StepStatus.ACCEPTED] or result.steps[1].reason
    assert "failed with status 500: oops" in result.steps[0].reason


def test_a_spent_budget_ends_the_requests(run) -> None:
    endpoint = Endpoint("no code " * 200)
    result = run(endpoint, budget_tokens=3000, steps=3)
    assert all("the model's budget is spent" in step.reason for step in result.steps)
    assert result.model_use.prompt_tokens + result.model_use.answer_tokens <= 3000 + 8192
    assert len(endpoint.requests) < 3


def test_a_planner_whose_budget_is_spent_ends_the_run(run) -> None:
    assert not run(Endpoint("x"), Backends(planner="llm"), budget_tokens=1).steps


def test_the_planner_may_choose_nothing_once_something_was_tried(run) -> None:
    one, none = '{"action": 1, "reason": "r"}', '{"action": 0, "reason": "all done"}'
    endpoint = Endpoint(one, "no code", none)
    assert len(run(endpoint, Backends("llm", "llm"), steps=3, repairs=0).steps) == 1
    assert "\n0. nothing" not in endpoint.prompt(0)
    assert "\n0. nothing" in endpoint.prompt(2)
    forms = [endpoint.requests[i]["response_format"]["json_schema"]["schema"]["properties"]["action"] for i in (0, 2)]
    assert [form["enum"][0] for form in forms] == [1, 0]
    early = Endpoint(none, one)
    assert len(run(early, Backends("llm")).steps) == 1
    assert "choose a number from 1 to" in str(early.requests[1]["messages"][-1]["content"])


@pytest.mark.parametrize(
    "answer", ['{"action": 1, "reason": "r"}', 'So:\n```json\n{"action": 1}\n```', "action: 1", "Action 1."]
)
def test_a_choice_is_parsed_from_different_formats(run, answer: str) -> None:
    endpoint = Endpoint(answer)
    assert len(run(endpoint, Backends(planner="llm")).steps) == 1
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    "illegal", ['{"action": 77}', '{"action": "fuse"}', "the first one", '{"action": tr', '{"action": -1}']
)
def test_after_two_invalid_choices_the_first_action_is_used(run, illegal: str) -> None:
    endpoint = Endpoint(illegal)
    result = run(endpoint, Backends(planner="llm"))
    assert len(endpoint.requests) == 2
    assert "Answer again" in str(endpoint.requests[1]["messages"][-1]["content"])
    assert "the model gave no usable choice" in result.steps[0].action.rationale
    mended = Endpoint(illegal, '{"action": 1, "reason": "now legal"}')
    assert "now legal" in run(mended, Backends(planner="llm")).steps[0].action.rationale


def test_a_rejected_key_ends_the_run_with_an_error(run) -> None:
    endpoint = Endpoint(Fault(401, "no such key"))
    for backends in (Backends(planner="llm"), Backends(coder="llm")):
        with pytest.raises(ModelNotUsable, match="rejects the API key"):
            run(endpoint, backends)
