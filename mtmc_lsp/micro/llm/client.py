"""A model behind an OpenAI-compatible endpoint: streaming, retries, limits, and a ledger of what was asked."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtmc_lsp.core.chat import BudgetSpent, Exchange, Message, ModelFailed, ModelNotUsable, ModelUse
from mtmc_lsp.core.redaction import redacted
from mtmc_lsp.core.settings import LlmSettings

if TYPE_CHECKING:
    import openai

CHARACTERS_PER_TOKEN = 3.0
"""Of code, on the low side: where an endpoint does not count, the estimate is rather too high."""
LONGEST_TOKEN = 16
"""Characters per token above which an answer has passed the limit that the endpoint was told."""
STRUCTURED, TOOL, PLAIN = "json_schema", "tool", "plain"
TOOL_NAME = "answer"
OPTIONS = ("stream_options", "temperature", "max_tokens", "max_completion_tokens")
"""What some endpoints refuse, and what can be done without."""


@dataclass
class _Answer:
    """What has come of an answer so far."""

    text: str = ""
    arguments: str = ""
    """Of the tool call, where one is made."""
    prompt_tokens: int = 0
    answer_tokens: int = 0

    @property
    def whole(self) -> str:
        return self.arguments or self.text


@dataclass
class OpenAIModel:
    """Asks the endpoint in ``OPENAI_BASE_URL``, and keeps a ledger."""

    settings: LlmSettings
    project: Path | None = None
    """Paths in it are sent relative to it."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    on_exchange: Callable[[Exchange], None] = lambda exchange: None
    """Is told every exchange, also those that failed."""
    exchanges: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.environ.get("MTMC_LLM_MODEL") or self.settings.model
        self._client: openai.OpenAI | None = None
        self._forms = [STRUCTURED, TOOL, PLAIN]
        self._refused: set[str] = set()
        self._seconds = 0.0

    # What is used ------------------------------------------------------------------------------------------------

    def use(self) -> ModelUse:
        """What all exchanges came to."""
        prompt = sum(item.prompt_tokens for item in self.exchanges)
        answer = sum(item.answer_tokens for item in self.exchanges)
        counted = all(item.counted for item in self.exchanges)
        return ModelUse(self.model, len(self.exchanges), prompt, answer, self._cost(prompt, answer), counted)

    def resume(self, exchanges: Sequence[Exchange]) -> None:
        """Count what an earlier part of the run asked already."""
        self.exchanges = [*exchanges, *self.exchanges]
        self._seconds += sum(item.seconds for item in exchanges)

    def _cost(self, prompt: int, answer: int) -> float | None:
        prices = (self.settings.price_prompt, self.settings.price_answer)
        return (prompt * prices[0] + answer * prices[1]) / 1e6 if any(prices) else None

    def _check_budget(self, messages: Sequence[Message]) -> None:
        limits, used = self.settings, self.use()
        tokens = used.prompt_tokens + used.answer_tokens
        expected = _tokens("".join(message.content for message in messages))
        if expected > limits.context_tokens:
            raise ModelFailed(
                f"the prompt has about {expected} tokens, more than llm.context_tokens = {limits.context_tokens}",
                remedy="Raise it if the model takes more, or optimise a smaller target.",
            )
        # A request is not begun whose answer would pass the limit, so a budget is a ceiling and not a target.
        cost = self._cost(used.prompt_tokens + expected, used.answer_tokens + limits.answer_tokens) or 0.0
        spent = ""
        if tokens + expected > limits.budget_tokens:
            spent = f"{tokens} of {limits.budget_tokens} tokens are used"
        elif limits.budget_money and cost > limits.budget_money:
            now = self._cost(used.prompt_tokens, used.answer_tokens) or 0.0
            spent = f"{now:.4g} of {limits.budget_money:g} are spent, and another answer may pass that"
        elif self._seconds >= limits.budget_seconds:
            spent = f"{self._seconds:.0f} of {limits.budget_seconds:g} s were spent waiting for it"
        if spent:
            remedy = "Raise llm.budget_tokens, llm.budget_money or llm.budget_seconds in [tool.mtmc.llm]."
            raise BudgetSpent(f"the model's budget is spent: {spent}", remedy=remedy)

    # Asking ------------------------------------------------------------------------------------------------------

    def ask(self, purpose: str, messages: Sequence[Message], schema: Mapping[str, object] | None = None) -> str:
        sent = tuple(Message(item.role, redacted(item.content, self.project)) for item in messages)
        self._check_budget(sent)
        client = self._connect()
        answer, error, began = _Answer(), "", time.monotonic()
        try:
            answer = self._asked(client, sent, schema, answer)
        except (ModelFailed, ModelNotUsable) as failure:
            error = failure.message
            raise
        finally:
            seconds = time.monotonic() - began
            self._seconds += seconds
            counted = bool(answer.prompt_tokens)
            text = "".join(item.content for item in sent)
            exchange = Exchange(
                purpose,
                sent,
                answer.whole,
                self.model,
                answer.prompt_tokens if counted else _tokens(text),
                answer.answer_tokens if counted else _tokens(answer.whole),
                seconds,
                error,
                counted,
            )
            self.exchanges.append(exchange)
            self.on_exchange(exchange)
        return answer.whole

    def _asked(
        self, client: openai.OpenAI, sent: Sequence[Message], schema: Mapping[str, object] | None, answer: _Answer
    ) -> _Answer:
        """One answer, after as many tries as it takes to find what the endpoint understands."""
        import openai

        while True:
            form = self._forms[0] if schema is not None else PLAIN
            try:
                with self._understood():
                    self._stream(client, self._request(sent, schema, form), answer)
                return answer
            except openai.BadRequestError as refusal:
                said = _said(refusal)
                option = next((name for name in OPTIONS if name in said and name not in self._refused), None)
                if option is not None:
                    self._refused.add(option)
                elif form != PLAIN:
                    self._forms.pop(0)
                else:
                    raise ModelFailed(f"the endpoint refuses the request: {said}") from None

    def _request(self, sent: Sequence[Message], schema: Mapping[str, object] | None, form: str) -> dict[str, Any]:
        limits = self.settings
        options: dict[str, Any] = {"stream_options": {"include_usage": True}}
        options["max_completion_tokens" if "max_tokens" in self._refused else "max_tokens"] = limits.answer_tokens
        if limits.temperature >= 0:
            options["temperature"] = limits.temperature
        request = {name: value for name, value in options.items() if name not in self._refused}
        if form == STRUCTURED:
            wanted = {"name": TOOL_NAME, "strict": True, "schema": schema}
            request["response_format"] = {"type": "json_schema", "json_schema": wanted}
        elif form == TOOL:
            request["tools"] = [{"type": "function", "function": {"name": TOOL_NAME, "parameters": schema}}]
            request["tool_choice"] = {"type": "function", "function": {"name": TOOL_NAME}}
        messages = [{"role": item.role, "content": item.content} for item in sent]
        return {"model": self.model, "messages": messages, "stream": True, **request}

    def _stream(self, client: openai.OpenAI, request: dict[str, Any], answer: _Answer) -> None:
        deadline = time.monotonic() + self.settings.timeout_seconds
        with client.chat.completions.create(**request) as stream:
            for chunk in stream:
                if chunk.usage is not None:
                    answer.prompt_tokens, answer.answer_tokens = (
                        chunk.usage.prompt_tokens,
                        chunk.usage.completion_tokens,
                    )
                for choice in chunk.choices[:1]:
                    answer.text += choice.delta.content or ""
                    for call in choice.delta.tool_calls or ():
                        answer.arguments += (call.function.arguments or "") if call.function else ""
                if time.monotonic() > deadline:
                    raise ModelFailed(f"the answer had not ended after {self.settings.timeout_seconds:g} s")
                if len(answer.whole) > LONGEST_TOKEN * self.settings.answer_tokens:
                    raise ModelFailed(f"the answer did not end at llm.answer_tokens = {self.settings.answer_tokens}")

    def _connect(self) -> openai.OpenAI:
        if self._client is None:
            _check_installed()
            if not self.model:
                raise ModelNotUsable(
                    "no model is named", remedy="Set MTMC_LLM_MODEL, or model in [tool.mtmc.llm] of pyproject.toml."
                )
            self._client = open_client(self.settings, self.environ)
        return self._client

    def _understood(self) -> _Understood:
        return _Understood(self.model, self.environ.get("OPENAI_BASE_URL", ""), self.settings)


def open_client(settings: LlmSettings, environ: Mapping[str, str]) -> openai.OpenAI:
    """The client of the endpoint that the environment names.

    Raises:
        ModelNotUsable: neither an endpoint nor a key is set.
    """
    import openai

    address, key = environ.get("OPENAI_BASE_URL"), environ.get("OPENAI_API_KEY")
    if not address and not key:
        raise ModelNotUsable(
            "no endpoint for a model is set",
            remedy="Set OPENAI_BASE_URL (and OPENAI_API_KEY, where it wants one), as in http://localhost:8000/v1.",
        )
    # Servers on one's own machine want no key, but the package wants some text there.
    return openai.OpenAI(
        base_url=address or None,
        api_key=key or "none",
        timeout=settings.timeout_seconds,
        max_retries=settings.retries,
    )


def look_at_endpoint(settings: LlmSettings, environ: Mapping[str, str]) -> list[str]:
    """The models that the endpoint offers.

    Raises:
        ModelNotUsable: it cannot be reached or refuses the key.
        ModelFailed: it gave no usable answer.
    """
    _check_installed()
    client = open_client(settings, environ).with_options(timeout=min(10.0, settings.timeout_seconds), max_retries=0)
    with _Understood("", environ.get("OPENAI_BASE_URL", ""), settings):
        return [item.id for item in client.models.list().data]


def _check_installed() -> None:
    if importlib.util.find_spec("openai") is None:
        raise ModelNotUsable("the openai package is not installed", remedy="Run: pip install 'mtmc-lsp[llm]'")


class _Understood:
    """Turns what the package raises into our own errors; a refused request (400) passes, for the caller to mend."""

    def __init__(self, model: str, address: str, settings: LlmSettings) -> None:
        self._model = model
        self._place = redacted(address) or "the endpoint"
        self._settings = settings

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            understood = self._error(error)
            if understood is not None:
                raise understood from None

    def _error(self, error: Exception) -> ModelNotUsable | ModelFailed | None:
        import openai

        tries = self._settings.retries + 1
        # What breaks in the middle of a stream comes from the package's own HTTP library, whose name changed.
        in_stream = type(error).__module__.startswith(("httpx", "httpcore"))
        if isinstance(error, openai.BadRequestError):
            return None
        if isinstance(error, (openai.AuthenticationError, openai.PermissionDeniedError)):
            return ModelNotUsable(
                f"{self._place} refuses the key: {_said(error)}", remedy="Set OPENAI_API_KEY to a valid one."
            )
        if isinstance(error, openai.NotFoundError):
            what = f"{self._place} knows no model {self._model!r}" if self._model else f"{self._place} lists no models"
            return ModelNotUsable(
                f"{what}: {_said(error)}", remedy="See `mtmc doctor`; check the model and OPENAI_BASE_URL."
            )
        if isinstance(error, openai.RateLimitError):
            return ModelFailed(f"{self._place} still asked to wait after {tries} tries: {_said(error)}")
        if isinstance(error, openai.APITimeoutError) or (in_stream and "Timeout" in type(error).__name__):
            return ModelFailed(f"{self._place} gave no answer within {self._settings.timeout_seconds:g} s")
        if isinstance(error, openai.APIConnectionError):
            remedy = "Start the server, or check OPENAI_BASE_URL."
            return ModelNotUsable(f"{self._place} cannot be reached", remedy=remedy)
        if isinstance(error, openai.APIStatusError):
            return ModelFailed(f"{self._place} failed with status {error.status_code}: {_said(error)}")
        if isinstance(error, (openai.OpenAIError, json.JSONDecodeError)) or in_stream:
            return ModelFailed(f"the answer of {self._place} broke off: {_first_line(error)}")
        return None


def _said(error: openai.APIStatusError) -> str:
    """The endpoint's own words, in one line without secrets: some repeat the key that they refuse."""
    body = error.body
    inner = body.get("message") if isinstance(body, dict) else None
    return redacted(_first_line(inner or error.message))


def _first_line(said: object) -> str:
    return next(iter(str(said).strip().splitlines()), "no reason given")[:300]


def _tokens(text: str) -> int:
    return int(len(text) / CHARACTERS_PER_TOKEN) + 1
