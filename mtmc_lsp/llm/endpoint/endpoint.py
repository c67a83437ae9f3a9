"""Requests to an OpenAI-compatible endpoint: uses the strictest answer format it supports, streams, and translates errors."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mtmc_lsp.core.chat import Message, ModelFailed, ModelNotUsable, repetition_start
from mtmc_lsp.core.settings import LlmSettings
from mtmc_lsp.llm.redaction import redacted

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

PUBLIC_HOST = "api.openai.com"
"""Host of requests if no base URL is set."""
MAX_CHARACTERS_PER_TOKEN = 16
"""Characters per token above which an answer exceeds the token limit of its request."""
STRUCTURED, OBJECT, TOOL, PLAIN = "json_schema", "json_object", "tool", "plain"
"""Formats of structured answers, strictest first. Some servers accept a schema only with the older ``json_object``."""
REPETITION = "repetition"
"""Finish reason when we abort an answer that repeats itself."""
CUT_SHORT = ("length", REPETITION, "")
"""Finish reasons of incomplete answers; empty if the stream ended without a reason."""
REPETITION_CHECK_INTERVAL = 32
"""Number of stream chunks between two checks for repetition."""
TOOL_NAME = "answer"
OPTIONAL_FIELDS = ("stream_options", "temperature", "max_tokens", "max_completion_tokens")
"""Request fields that some endpoints reject and that can be omitted."""
REASONING = re.compile(r"\A\s*<think(?:ing)?>.*?(?:</think(?:ing)?>\s*|\Z)", re.DOTALL)
"""Reasoning text before an answer; drafts in it must not be read as the answer."""
CONTEXT_LENGTH = re.compile(r"maximum context length is (\d+)")
PROMPT_LENGTH = re.compile(r"(\d+) (?:input tokens|(?:tokens )?in the messages)")


@dataclass
class Answer:
    """The part of an answer received so far."""

    text: str = ""
    arguments: str = ""
    """Arguments of the tool call, if the model calls a tool."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    pieces: int = 0
    finish: str = ""
    """Finish reason of the endpoint: ``stop``, ``length``, ...; empty if none was received."""

    @property
    def content(self) -> str:
        """The answer without reasoning text."""
        return REASONING.sub("", self.arguments or self.text)

    @property
    def length(self) -> int:
        """Characters received."""
        return len(self.text) + len(self.arguments)


class Endpoint:
    """Sends requests to one endpoint, and learns which formats and fields it supports."""

    def __init__(self, model: str, settings: LlmSettings, environ: Mapping[str, str]) -> None:
        self._model = model
        self._settings = settings
        self._environ = environ
        self._forms = [STRUCTURED, OBJECT, TOOL, PLAIN]
        self._refused: set[str] = set()
        self._streams = True

    @property
    def form(self) -> str:
        """The answer format that is used at present."""
        return self._forms[0]

    def only(self, form: str) -> None:
        """Use only this answer format."""
        self._forms = [form]

    def open(self) -> openai.AsyncOpenAI:
        """A client; the caller closes it."""
        import openai

        return openai.AsyncOpenAI(**client_options(self._settings, self._environ))

    async def ask(
        self,
        client: openai.AsyncOpenAI,
        sent: Sequence[Message],
        answer: Answer,
        *,
        schema: Mapping[str, object] | None,
        max_tokens: int,
    ) -> None:
        """Fill ``answer``. Retries with other formats until the endpoint accepts the request.

        Raises:
            ModelNotUsable: no request can succeed until the user changes the configuration.
            ModelFailed: this request failed.
        """
        import openai

        while True:
            form = self._forms[0] if schema is not None else PLAIN
            request = self._request(sent, schema, form, max_tokens)
            try:
                with self.translated_errors():
                    await self._receive(client, request, answer, max_tokens)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as refusal:
                smaller_limit = _remaining_context(refusal, max_tokens)
                if smaller_limit:
                    max_tokens = smaller_limit
                elif not self._learn(refusal, request, form):
                    raise ModelFailed(f"{self._host} rejects the request: {_error_text(refusal)}") from None
                continue
            except ModelFailed:
                # Some servers fail on a schema instead of rejecting the request.
                if form == PLAIN or answer.length or not self._drop(form):
                    raise
                continue
            if not answer.length and not answer.finish and self._streams:
                # The endpoint does not stream: it answered with one document instead of chunks.
                self._streams = False
                continue
            if form != PLAIN and not _is_object(answer.content) and answer.finish not in ("length", REPETITION):
                # The endpoint ignored the schema: use another format for the next question.
                self._drop(form)
            return

    def _learn(self, refusal: openai.APIStatusError, request: Mapping[str, Any], form: str) -> bool:
        """Stop using a feature that the endpoint rejects. False if nothing else can be omitted."""
        message = _error_text(refusal)
        field = next((name for name in OPTIONAL_FIELDS if name in request and name in message), None)
        if field is not None:
            self._refused.add(field)
            return True
        if request["stream"] and re.search(r"\bstream(?:ing)?\b", message):
            self._streams = False
            return True
        return form != PLAIN and self._drop(form)

    def _drop(self, form: str) -> bool:
        """Switch to the next answer format. False if this was the last one."""
        # Concurrent requests may each detect the same limitation.
        if self._forms[0] == form and len(self._forms) > 1:
            self._forms.pop(0)
        return self._forms[0] != form

    def _request(
        self, sent: Sequence[Message], schema: Mapping[str, object] | None, form: str, max_tokens: int
    ) -> dict[str, Any]:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if self._streams else {}
        options["max_completion_tokens" if "max_tokens" in self._refused else "max_tokens"] = max_tokens
        if self._settings.temperature >= 0:
            options["temperature"] = self._settings.temperature
        request = {name: value for name, value in options.items() if name not in self._refused}
        if form == STRUCTURED:
            schema_format = {"name": TOOL_NAME, "strict": True, "schema": schema}
            request["response_format"] = {"type": "json_schema", "json_schema": schema_format}
        elif form == OBJECT:
            request["response_format"] = {"type": "json_object", "schema": schema}
        elif form == TOOL:
            request["tools"] = [{"type": "function", "function": {"name": TOOL_NAME, "parameters": schema}}]
            request["tool_choice"] = {"type": "function", "function": {"name": TOOL_NAME}}
        messages = [{"role": item.role, "content": item.content} for item in sent]
        return {"model": self._model, "messages": messages, "stream": self._streams, **request}

    async def _receive(
        self, client: openai.AsyncOpenAI, request: dict[str, Any], answer: Answer, max_tokens: int
    ) -> None:
        response = await client.chat.completions.create(**request)
        if not request["stream"]:
            _read_completion(response, answer)
            return
        seconds = self._settings.timeout_seconds
        try:
            async with response as stream:
                await asyncio.wait_for(self._read(stream, answer, max_tokens), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise ModelFailed(f"the answer was not complete after {seconds:g} s") from None

    async def _read(self, stream: AsyncIterator[ChatCompletionChunk], answer: Answer, max_tokens: int) -> None:
        async for chunk in stream:
            if chunk.usage is not None:
                answer.prompt_tokens = chunk.usage.prompt_tokens
                answer.answer_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices[:1]:
                answer.pieces += 1
                answer.text += choice.delta.content or choice.delta.refusal or ""
                for call in choice.delta.tool_calls or ():
                    answer.arguments += (call.function.arguments or "") if call.function else ""
                answer.finish = choice.finish_reason or answer.finish
            if (
                answer.pieces % REPETITION_CHECK_INTERVAL == 0
                and repetition_start(answer.arguments or answer.text) is not None
            ):
                # The rest would cost tokens without information. Closing the stream tells the server to stop.
                answer.finish = REPETITION
                return
            # A chunk holds at least one token; the first and the last may be empty.
            if answer.length > MAX_CHARACTERS_PER_TOKEN * max_tokens or answer.pieces > max_tokens + 8:
                raise ModelFailed(f"the answer did not end at its limit of {max_tokens} tokens")

    def translated_errors(self) -> _ErrorTranslation:
        """Context manager that translates errors of the openai package into ours."""
        return _ErrorTranslation(self._model, self._host, self._settings)

    @property
    def _host(self) -> str:
        return redacted(self._environ.get("OPENAI_BASE_URL", "")) or PUBLIC_HOST


def host_of(environ: Mapping[str, str]) -> str:
    """The host (and port) of the endpoint; empty if neither a base URL nor a key is set."""
    base_url = environ.get("OPENAI_BASE_URL", "")
    if not base_url:
        return PUBLIC_HOST if environ.get("OPENAI_API_KEY") else ""
    return urlsplit(base_url).netloc.rpartition("@")[2] or redacted(base_url)


def client_options(settings: LlmSettings, environ: Mapping[str, str]) -> dict[str, Any]:
    """Constructor arguments for clients of the openai package.

    Raises:
        ModelNotUsable: the package is not installed, or neither an endpoint nor a key is set.
    """
    if importlib.util.find_spec("openai") is None:
        raise ModelNotUsable("the openai package is not installed", remedy="Run: pip install 'mtmc-lsp[llm]'")
    base_url, key = environ.get("OPENAI_BASE_URL"), environ.get("OPENAI_API_KEY")
    if not base_url and not key:
        raise ModelNotUsable(
            "no model endpoint is configured",
            remedy="Set OPENAI_BASE_URL, for example to http://localhost:8000/v1, and OPENAI_API_KEY if it needs a key.",
        )
    return {
        "base_url": base_url or None,
        # Local servers need no key, but the package requires a non-empty one.
        "api_key": key or "none",
        "timeout": settings.timeout_seconds,
        "max_retries": settings.retries,
    }


def _read_completion(completion: ChatCompletion, answer: Answer) -> None:
    if completion.usage is not None:
        answer.prompt_tokens, answer.answer_tokens = completion.usage.prompt_tokens, completion.usage.completion_tokens
    for choice in completion.choices[:1]:
        answer.text = choice.message.content or choice.message.refusal or ""
        for call in choice.message.tool_calls or ():
            answer.arguments += call.function.arguments if call.type == "function" else ""
        answer.finish = choice.finish_reason or "stop"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _remaining_context(refusal: openai.APIStatusError, max_tokens: int) -> int:
    """Tokens that the context window leaves for an answer, parsed from the error message; 0 if unknown."""
    message = _error_text(refusal)
    context_length, prompt_length = CONTEXT_LENGTH.search(message), PROMPT_LENGTH.search(message)
    remaining = int(context_length[1]) - int(prompt_length[1]) if context_length and prompt_length else 0
    return remaining if 0 < remaining < max_tokens else 0


class _ErrorTranslation:
    """Translates errors of the openai package into ours. Rejected requests (400, 422) pass through: the caller adapts them."""

    def __init__(self, model: str, host: str, settings: LlmSettings) -> None:
        self._model = model
        self._host = host
        self._settings = settings

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            translated = self._error(error)
            if translated is not None:
                raise translated from None

    def _error(self, error: Exception) -> ModelNotUsable | ModelFailed | None:
        import openai

        attempts = self._settings.retries + 1
        # Errors in the middle of a stream come from the HTTP library of the package, whose module name depends on the version.
        in_stream = type(error).__module__.startswith(("httpx", "httpcore"))
        if isinstance(error, (openai.BadRequestError, openai.UnprocessableEntityError)):
            return None
        if isinstance(error, (openai.AuthenticationError, openai.PermissionDeniedError)):
            return ModelNotUsable(
                f"{self._host} rejects the API key: {_error_text(error)}", remedy="Set OPENAI_API_KEY to a valid key."
            )
        if isinstance(error, openai.NotFoundError):
            message = f"{self._host} has no model {self._model!r}" if self._model else f"{self._host} lists no models"
            return ModelNotUsable(
                f"{message}: {_error_text(error)}",
                remedy="Run `mtmc doctor` to list the models; check the model name and OPENAI_BASE_URL.",
            )
        if isinstance(error, openai.RateLimitError):
            wait = error.response.headers.get("retry-after")
            hint = f" (retry after {wait} s)" if wait else ""
            return ModelFailed(
                f"{self._host} is still rate limited after {attempts} attempts{hint}: {_error_text(error)}"
            )
        if isinstance(error, openai.APITimeoutError) or (in_stream and "Timeout" in type(error).__name__):
            return ModelFailed(f"{self._host} did not answer within {self._settings.timeout_seconds:g} s")
        if isinstance(error, openai.APIConnectionError):
            remedy = "Start the server, or check OPENAI_BASE_URL."
            return ModelNotUsable(f"{self._host} cannot be reached", remedy=remedy)
        if isinstance(error, openai.APIStatusError):
            return ModelFailed(f"{self._host} failed with status {error.status_code}: {_error_text(error)}")
        if isinstance(error, (openai.OpenAIError, json.JSONDecodeError)) or in_stream:
            return ModelFailed(f"the answer of {self._host} was interrupted: {_first_line(error)}")
        return None


def _error_text(error: openai.APIStatusError) -> str:
    """The error message of the endpoint, one line without secrets: some endpoints repeat the rejected key."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    return redacted(_first_line(message or error.message))


def _first_line(message: object) -> str:
    return next(iter(str(message).strip().splitlines()), "no reason given")[:300]
