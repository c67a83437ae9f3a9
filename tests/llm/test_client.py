"""Answers and errors of an endpoint over real HTTP."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from endpoint import KEY, Endpoint, Fault

from mtmc_lsp.core.chat import (
    REPEATING,
    BudgetSpent,
    Message,
    ModelFailed,
    ModelNotUsable,
    repetition_start,
    truncate_answer,
    truncation_notice,
)
from mtmc_lsp.core.settings import LlmSettings
from mtmc_lsp.llm.endpoint.client import OpenAIModel
from mtmc_lsp.llm.endpoint.probe import Abilities, list_models, probe_abilities
from mtmc_lsp.llm.planner import answer_schema

MANY = " ".join(str(number) for number in range(400))
UNLIMITED = {"answer_tokens": 10**8, "budget_tokens": 10**9}
HELLO = [Message("user", "hello")]
QUICK = LlmSettings(timeout_seconds=5.0, retries=0)


def model(environ: dict[str, str], **settings: Any) -> OpenAIModel:
    return OpenAIModel(replace(QUICK, **settings), environ=environ)


def answer_of(asked: OpenAIModel) -> str:
    (reply,) = asked.ask("code", HELLO)
    return reply.text


def test_an_answer_is_streamed_and_its_tokens_are_counted() -> None:
    endpoint = Endpoint("a long answer " * 20)
    with endpoint.serving() as environ:
        asked = model(environ, price_prompt=2.0, price_answer=10.0)
        assert answer_of(asked) == "a long answer " * 20
    use = asked.use()
    assert (use.requests, use.prompt_tokens, use.answer_tokens, use.counted) == (1, 1, 70, True)
    assert use.cost == pytest.approx((1 * 2 + 70 * 10) / 1e6)
    assert endpoint.requests[0]["stream"] is True


def test_tokens_are_estimated_where_the_endpoint_does_not_count() -> None:
    with Endpoint("x" * 300, counts=False).serving() as environ:
        asked = model(environ)
        asked.ask("code", HELLO)
    assert not asked.use().counted
    assert asked.use().answer_tokens >= 100


@pytest.mark.parametrize(
    ("refuses", "field"),
    [((), "response_format"), (("response_format",), "tools"), (("response_format", "tools"), "messages")],
)
def test_a_choice_is_requested_in_the_strictest_supported_format(refuses, field) -> None:
    endpoint = Endpoint('{"action": 2, "reason": "it is large"}', refuses=refuses)
    with endpoint.serving() as environ:
        asked = model(environ)
        for _ in range(2):
            assert '"action": 2' in asked.ask("plan", HELLO, schema=answer_schema(3))[0].text
    assert all(field in request and not set(refuses) & set(request) for request in endpoint.requests)
    assert len(endpoint.requests) == 2


def test_a_server_that_supports_schemas_only_with_the_older_format_gets_that_format() -> None:
    def answer(request: dict[str, Any]) -> Any:
        known = request.get("response_format", {}).get("type") == "json_object"
        return '{"number": 7}' if known and request["response_format"]["schema"] else Fault(500, "1 validation error")

    endpoint = Endpoint(answer)
    with endpoint.serving() as environ:
        asked = model(environ)
        for _ in range(2):
            assert asked.ask("plan", HELLO, schema=answer_schema(3))[0].text == '{"number": 7}'
        assert probe_abilities("tiny", QUICK, environ).structured == ""
    assert [request["response_format"]["type"] for request in endpoint.requests[:2]] == ["json_schema", "json_object"]


@pytest.mark.parametrize("option", ["max_tokens", "stream_options", "temperature"])
def test_a_rejected_field_is_omitted(option: str) -> None:
    endpoint = Endpoint("fine", refuses=(option,))
    with endpoint.serving() as environ:
        assert answer_of(model(environ, temperature=0.2)) == "fine"
    assert option not in endpoint.requests[0]
    assert ("max_completion_tokens" in endpoint.requests[0]) == (option == "max_tokens")


def test_a_rate_limit_is_retried_after_the_requested_time() -> None:
    wait = Fault(429, "slow down", {"Retry-After": "1"})
    with Endpoint(wait, "after all").serving() as environ:
        began = time.monotonic()
        assert answer_of(model(environ, retries=1)) == "after all"
        assert time.monotonic() - began >= 1.0


def test_a_server_error_is_retried() -> None:
    with Endpoint(Fault(500, "oops"), "after all").serving() as environ:
        assert answer_of(model(environ, retries=1)) == "after all"


def piece(text: str) -> bytes:
    return b'data: {"id":"c","object":"chat.completion.chunk","created":0,"model":"tiny","choices":' + text.encode()


@pytest.mark.parametrize(
    ("fault", "settings", "message"),
    [
        (Fault(429, "slow down"), {}, "still rate limited after 1 attempts: slow down"),
        (Fault(503, "down for repairs"), {}, "failed with status 503: down for repairs"),
        (Fault(400, "context length exceeded"), {}, "rejects the request: context length exceeded"),
        (Fault(wait=5.0), {"timeout_seconds": 1.5}, "did not answer within 1.5 s"),
        (Fault(chunks=(piece('[{"ind') + b"\n\n",)), {}, "was interrupted"),
        (Fault(chunks=(b'data: {"error": {"message": "out of memory"}}\n\n',)), {}, "was interrupted: out of memory"),
        (Fault(endless="word " * 50), {"answer_tokens": 100}, "did not end at its limit of 100 tokens"),
        (Fault(endless=MANY), {"timeout_seconds": 1.5, **UNLIMITED}, "was not complete after 1.5 s"),
    ],
)
def test_a_failed_request_gives_its_reason_and_the_next_may_succeed(fault, settings, message) -> None:
    with Endpoint(fault, "better").serving() as environ:
        asked = model(environ, **settings)
        with pytest.raises(ModelFailed) as failure:
            asked.ask("code", HELLO)
        assert message in failure.value.message
        assert asked.exchanges[0].error == failure.value.message
        # The short limit is for the request that fails.
        asked.settings = asked._endpoint._settings = replace(asked.settings, timeout_seconds=60.0)
        assert answer_of(asked) == "better"


def test_a_rejected_key_is_reported_but_not_shown() -> None:
    with Endpoint("x").serving() as environ:
        key = "sk-wrong-0123456789abcdef"
        with pytest.raises(ModelNotUsable, match="rejects the API key") as failure:
            model({**environ, "OPENAI_API_KEY": key}).ask("code", HELLO)
    assert "OPENAI_API_KEY" in failure.value.remedy
    assert key not in str(failure.value)


def test_a_missing_model_is_named() -> None:
    with Endpoint("x").serving() as environ, pytest.raises(ModelNotUsable, match="has no model 'huge'"):
        model({**environ, "MTMC_LLM_MODEL": "huge"}).ask("code", HELLO)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no model is configured"),
        ({"MTMC_LLM_MODEL": "m"}, "no model endpoint"),
        ({"MTMC_LLM_MODEL": "m", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}, "127.0.0.1:9/v1 cannot be reached"),
    ],
)
def test_a_missing_endpoint_is_an_environment_error_with_a_remedy(environ, message) -> None:
    with pytest.raises(ModelNotUsable, match=message) as failure:
        model(environ).ask("code", HELLO)
    assert failure.value.exit_code == 3
    assert failure.value.remedy


def test_doctor_lists_the_models() -> None:
    with Endpoint("x").serving() as environ:
        assert list_models(QUICK, environ) == ["tiny"]
        with pytest.raises(ModelNotUsable, match="rejects the API key"):
            list_models(QUICK, {**environ, "OPENAI_API_KEY": "bad"})


def test_doctor_detects_which_answer_constraints_a_model_supports() -> None:
    seven = '{"number": 7}'
    with Endpoint(seven).serving() as environ:
        assert probe_abilities("tiny", QUICK, environ) == Abilities("", "", counts=True)
    with Endpoint(seven, refuses=("tools",)).serving() as environ:
        found = probe_abilities("tiny", QUICK, environ)
        assert (found.structured, "Unrecognized request argument" in found.tools) == ("", True)
    with Endpoint("Seven, of course!", counts=False).serving() as environ:
        found = probe_abilities("tiny", QUICK, environ)
        assert found == Abilities("it answers 'Seven, of course!'", "it answers 'Seven, of course!'", counts=False)
    with Endpoint(seven).serving() as environ, pytest.raises(ModelNotUsable, match="has no model 'huge'"):
        probe_abilities("huge", QUICK, environ)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget_tokens": 300}, "of 300 tokens are used"),
        ({"budget_money": 0.02, "price_answer": 100.0, "answer_tokens": 120}, "of 0.02 are spent"),
    ],
)
def test_no_request_is_sent_that_could_exceed_the_budget(settings, message) -> None:
    endpoint = Endpoint("x" * 400)
    with endpoint.serving() as environ:
        asked = model(environ, **settings)
        asked.ask("code", HELLO)
        with pytest.raises(BudgetSpent, match=message):
            asked.ask("code", HELLO)
    assert len(endpoint.requests) == 1
    assert (asked.use().cost or 0.0) <= 0.02


def test_the_time_budget_aborts_an_answer_in_progress() -> None:
    endpoint = Endpoint(Fault(wait=1.5), "x")
    with endpoint.serving() as environ:
        asked = model(environ, budget_seconds=0.4)
        with pytest.raises(ModelFailed, match=r"budget_seconds = 0\.4 ended before the answer was complete"):
            asked.ask("code", HELLO)
        with pytest.raises(BudgetSpent, match=r"of 0\.4 s were spent waiting for answers"):
            asked.ask("code", HELLO)
    assert [item.failure for item in asked.exchanges] == ["model-failed", "model-budget"]
    assert asked.use().requests == 1


def test_the_end_of_the_run_aborts_an_answer_in_progress() -> None:
    endpoint = Endpoint(Fault(wait=30.0), "x")
    with endpoint.serving() as environ:
        began = time.monotonic()
        asked = OpenAIModel(QUICK, environ=environ, deadline=began + 0.4)
        with pytest.raises(ModelFailed, match="the time limit of the run ended before the answer was complete"):
            asked.ask("code", HELLO)
        assert time.monotonic() - began < 25


def test_several_answers_are_requested_concurrently() -> None:
    together = threading.Barrier(3, timeout=60)

    def answer(request: dict[str, Any]) -> str:
        return f"answer {together.wait()}"

    with Endpoint(answer).serving() as environ:
        asked = model(environ)
        replies = asked.ask("code", HELLO, samples=3)
    assert sorted(reply.text for reply in replies) == ["answer 0", "answer 1", "answer 2"]
    assert [item.question for item in asked.exchanges] == [1, 1, 1]
    assert asked.use().requests == 3


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"budget_tokens": 3000}, 3000),
        ({"budget_tokens": 700}, 700),
        ({"budget_money": 0.3, "price_prompt": 10.0, "price_answer": 100.0}, 3000),
    ],
)
def test_concurrent_answers_never_exceed_a_budget(settings, tokens: int) -> None:
    endpoint = Endpoint(" ".join(str(number) for number in range(10**5)))
    with endpoint.serving() as environ:
        asked = model(environ, **settings)
        with contextlib.suppress(BudgetSpent):
            while len(endpoint.requests) < 100:
                asked.ask("code", HELLO, samples=4)
    use = asked.use()
    assert tokens - 300 < use.prompt_tokens + use.answer_tokens <= tokens
    assert (use.cost or 0.0) <= 0.3
    assert all(request["max_tokens"] <= tokens for request in endpoint.requests)
    assert len(endpoint.requests) == use.requests


def test_a_failed_answer_does_not_affect_the_others() -> None:
    with Endpoint(Fault(500, "oops"), "fine").serving() as environ:
        asked = model(environ)
        assert [reply.text for reply in asked.ask("code", HELLO, samples=3)] == ["fine", "fine"]
    assert sorted(item.error for item in asked.exchanges)[:2] == ["", ""]


def test_an_answer_that_reaches_its_limit_is_marked_as_cut() -> None:
    with Endpoint("x" * 400).serving() as environ:
        (reply,) = model(environ, answer_tokens=20).ask("code", HELLO)
    assert reply.is_truncated
    assert len(reply.text) == 80


@pytest.mark.parametrize("said", [" ", "-", "x = tl.load(p)\n", "    a = 1\n    b = 2\n    c = a + b\n"])
def test_a_repetitive_answer_is_aborted_and_marked_as_cut(said: str) -> None:
    with Endpoint(Fault(endless=said)).serving() as environ:
        asked = model(environ, answer_tokens=10**6, timeout_seconds=60.0)
        (reply,) = asked.ask("code", HELLO)
    assert reply.is_truncated
    assert len(reply.text) < 40_000
    assert asked.exchanges[0].is_truncated
    assert truncation_notice(reply) == REPEATING
    assert len(truncate_answer(reply.text)) < 300, "the same is not quoted again and again"


def test_unrolled_code_is_not_repetition() -> None:
    assert repetition_start("".join(f"    total += tl.load(x_ptr + {i} * stride)\n" for i in range(200))) is None
    assert repetition_start(f"# {'-' * 120}\n") is None
    assert repetition_start("    a\n" * 200 + "    done()\n") is None, "it came out again"


def test_reasoning_text_is_not_part_of_the_answer() -> None:
    with Endpoint("<think>first\n<<<<<<< SEARCH</think>\nfine").serving() as environ:
        assert answer_of(model(environ)) == "fine"


def test_an_endpoint_without_streaming_gets_plain_requests() -> None:
    for endpoint in (Endpoint("fine", streams=False), Endpoint("fine", refuses=("stream",))):
        with endpoint.serving() as environ:
            asked = model(environ)
            assert answer_of(asked) == "fine"
            assert answer_of(asked) == "fine"
        assert asked.use().counted
        assert [bool(request["stream"]) for request in endpoint.requests][-1] is False


def test_a_model_with_a_short_context_gets_a_smaller_answer_limit() -> None:
    def answer(request: dict[str, Any]) -> Any:
        said = "This model's maximum context length is 2048 tokens and your request has 1000 input tokens (max_tokens)"
        return "fine" if request["max_tokens"] <= 1048 else Fault(400, said)

    endpoint = Endpoint(answer)
    with endpoint.serving() as environ:
        assert answer_of(model(environ)) == "fine"
    assert [request["max_tokens"] for request in endpoint.requests] == [8192, 1048]


@pytest.mark.parametrize("status", [422, 500])
def test_a_server_that_fails_on_a_schema_gets_requests_without_one(status: int) -> None:
    def answer(request: dict[str, Any]) -> Any:
        return Fault(status, "no grammar") if {"response_format", "tools"} & set(request) else '{"action": 1}'

    with Endpoint(answer).serving() as environ:
        (reply,) = model(environ).ask("plan", HELLO, schema=answer_schema(3))
    assert reply.text == '{"action": 1}'


def test_a_server_that_ignores_a_schema_gets_another_format_next_time() -> None:
    endpoint = Endpoint("I would take the first.")
    with endpoint.serving() as environ:
        asked = model(environ)
        for _ in range(3):
            asked.ask("plan", HELLO, schema=answer_schema(3))
    fields = [{"response_format", "tools"} & set(request) for request in endpoint.requests]
    assert fields == [{"response_format"}, {"response_format"}, {"tools"}]


def test_a_prompt_that_is_too_long_is_not_sent() -> None:
    endpoint = Endpoint("x")
    with endpoint.serving() as environ, pytest.raises(ModelFailed, match=r"more than llm\.context_tokens = 10"):
        model(environ, context_tokens=10).ask("code", [Message("user", "x" * 100)])
    assert not endpoint.requests


def test_secrets_and_absolute_paths_are_not_sent(tmp_path) -> None:
    endpoint = Endpoint("x")
    said = f"""\
File {tmp_path}/pkg/model.py and /home/ann/data/set.bin
API_KEY = "abcd-efgh"
token: 'not-yours'
url = "https://ann:pass@host/x"
key = "sk-proj-abcdefghijklmnop0123"
headers = {{"Authorization": f"Bearer ab12.cd34-ef56"}}
-----BEGIN RSA PRIVATE KEY-----
MIIEow
-----END RSA PRIVATE KEY-----
y = a / b  # aten.add.Tensor
"""
    with endpoint.serving() as environ:
        OpenAIModel(QUICK, tmp_path, environ).ask("code", [Message("user", said)])
    sent = endpoint.prompt()
    for secret in (str(tmp_path), "/home/ann", "abcd-efgh", "not-yours", "ann:pass", "sk-proj", "ab12", "MIIEow", KEY):
        assert secret not in sent
    assert "File pkg/model.py" in sent
    assert "y = a / b  # aten.add.Tensor" in sent
