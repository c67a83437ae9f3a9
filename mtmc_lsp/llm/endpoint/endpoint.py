"""One answer of an OpenAI-compatible endpoint: in the strictest form that it knows, streamed, and its faults understood."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mtmc_lsp.core.chat import Message, ModelFailed, ModelNotUsable
from mtmc_lsp.core.repetition import repetition_start
from mtmc_lsp.core.settings import LlmSettings
from mtmc_lsp.llm.redaction import redacted

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

PUBLIC_HOST = "api.openai.com"
"""Where requests go when no address is set."""
LONGEST_TOKEN = 16
"""Characters per token above which an answer has passed the limit that the endpoint was told."""
STRUCTURED, OBJECT, TOOL, PLAIN = "json_schema", "json_object", "tool", "plain"
"""How a choice is asked for: some servers take a schema only with their older name for JSON answers."""
REPEATING = "circles"
"""Why we ended an answer ourselves."""
CUT_SHORT = ("length", REPEATING, "")
"""Why an answer ended that did not come to its own end."""
LOOK_EVERY = 32
"""Pieces of an answer after which it is looked at."""
TOOL_NAME = "answer"
OPTIONS = ("stream_options", "temperature", "max_tokens", "max_completion_tokens")
"""What some endpoints refuse, and what can be done without."""
THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*?(?:</think(?:ing)?>\s*|\Z)", re.DOTALL)
"""What some models say to themselves before they answer; drafts in it are no answer."""
CONTEXT = re.compile(r"maximum context length is (\d+)")
USED = re.compile(r"(\d+) (?:input tokens|(?:tokens )?in the messages)")


@dataclass
class Answer:
    """What has come of an answer so far."""

    text: str = ""
    arguments: str = ""
    """Of the tool call, where one is made."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    pieces: int = 0
    finish: str = ""
    """Why the endpoint ended it: ``stop``, ``length``, ...; empty where it never said."""

    @property
    def whole(self) -> str:
        """The answer without the model's thoughts."""
        return THOUGHTS.sub("", self.arguments or self.text)

    @property
    def length(self) -> int:
        """Characters received."""
        return len(self.text) + len(self.arguments)


class Endpoint:
    """What is known of the endpoint, and how it is asked."""

    def __init__(self, model: str, settings: LlmSettings, environ: Mapping[str, str]) -> None:
        self._model = model
        self._settings = settings
        self._environ = environ
        self._forms = [STRUCTURED, OBJECT, TOOL, PLAIN]
        self._refused: set[str] = set()
        self._streams = True

    @property
    def form(self) -> str:
        """How a choice is asked for at present."""
        return self._forms[0]

    def only(self, form: str) -> None:
        """Ask for choices in this form, and in no other."""
        self._forms = [form]

    def open(self) -> openai.AsyncOpenAI:
        """A client; to be closed."""
        import openai

        return openai.AsyncOpenAI(**client_options(self._settings, self._environ))

    async def ask(
        self,
        client: openai.AsyncOpenAI,
        sent: Sequence[Message],
        answer: Answer,
        *,
        schema: Mapping[str, object] | None,
        most_tokens: int,
    ) -> None:
        """Fill ``answer``, after as many tries as it takes to find what the endpoint understands.

        Raises:
            ModelNotUsable: nothing can be asked here until the user changes something.
            ModelFailed: this one request came to nothing.
        """
        import openai

        while True:
            form = self._forms[0] if schema is not None else PLAIN
            request = self._request(sent, schema, form, most_tokens)
            try:
                with self.understood():
                    await self._receive(client, request, answer, most_tokens)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as refusal:
                less = _room(refusal, most_tokens)
                if less:
                    most_tokens = less
                elif not self._learn(refusal, request, form):
                    raise ModelFailed(f"{self._place} refuses the request: {_said(refusal)}") from None
                continue
            except ModelFailed:
                # Some servers fail where they meet a schema, rather than refuse it.
                if form == PLAIN or answer.length or not self._drop(form):
                    raise
                continue
            if not answer.length and not answer.finish and self._streams:
                # It does not stream, and answered in one piece that is no stream's.
                self._streams = False
                continue
            if form != PLAIN and not _is_object(answer.whole) and answer.finish not in ("length", REPEATING):
                # It took the schema and did not keep to it; the next question asks otherwise.
                self._drop(form)
            return

    def _learn(self, refusal: openai.APIStatusError, request: Mapping[str, Any], form: str) -> bool:
        """Do without what the endpoint refuses; false where there is nothing more to do without."""
        said = _said(refusal)
        option = next((name for name in OPTIONS if name in request and name in said), None)
        if option is not None:
            self._refused.add(option)
            return True
        if request["stream"] and re.search(r"\bstream(?:ing)?\b", said):
            self._streams = False
            return True
        return form != PLAIN and self._drop(form)

    def _drop(self, form: str) -> bool:
        """Ask for choices in the next form; false where this was the last."""
        # Answers that are asked for together may each find out the same.
        if self._forms[0] == form and len(self._forms) > 1:
            self._forms.pop(0)
        return self._forms[0] != form

    def _request(
        self, sent: Sequence[Message], schema: Mapping[str, object] | None, form: str, most_tokens: int
    ) -> dict[str, Any]:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if self._streams else {}
        options["max_completion_tokens" if "max_tokens" in self._refused else "max_tokens"] = most_tokens
        if self._settings.temperature >= 0:
            options["temperature"] = self._settings.temperature
        request = {name: value for name, value in options.items() if name not in self._refused}
        if form == STRUCTURED:
            wanted = {"name": TOOL_NAME, "strict": True, "schema": schema}
            request["response_format"] = {"type": "json_schema", "json_schema": wanted}
        elif form == OBJECT:
            request["response_format"] = {"type": "json_object", "schema": schema}
        elif form == TOOL:
            request["tools"] = [{"type": "function", "function": {"name": TOOL_NAME, "parameters": schema}}]
            request["tool_choice"] = {"type": "function", "function": {"name": TOOL_NAME}}
        messages = [{"role": item.role, "content": item.content} for item in sent]
        return {"model": self._model, "messages": messages, "stream": self._streams, **request}

    async def _receive(
        self, client: openai.AsyncOpenAI, request: dict[str, Any], answer: Answer, most_tokens: int
    ) -> None:
        given = await client.chat.completions.create(**request)
        if not request["stream"]:
            _take_whole(given, answer)
            return
        seconds = self._settings.timeout_seconds
        try:
            async with given as stream:
                await asyncio.wait_for(self._read(stream, answer, most_tokens), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise ModelFailed(f"the answer had not ended after {seconds:g} s") from None

    async def _read(self, stream: AsyncIterator[ChatCompletionChunk], answer: Answer, most_tokens: int) -> None:
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
            if answer.pieces % LOOK_EVERY == 0 and repetition_start(answer.arguments or answer.text) is not None:
                # What follows would cost and say nothing; leaving the stream tells the server to stop.
                answer.finish = REPEATING
                return
            # A piece holds a token at least; the first and the last may hold none.
            if answer.length > LONGEST_TOKEN * most_tokens or answer.pieces > most_tokens + 8:
                raise ModelFailed(f"the answer did not end at {most_tokens} tokens, the most that it was allowed")

    def understood(self) -> _Understood:
        """Turns what the package raises into our own errors."""
        return _Understood(self._model, self._place, self._settings)

    @property
    def _place(self) -> str:
        return redacted(self._environ.get("OPENAI_BASE_URL", "")) or PUBLIC_HOST


def host_of(environ: Mapping[str, str]) -> str:
    """The host (and port) that requests would go to; empty where neither an address nor a key is set."""
    address = environ.get("OPENAI_BASE_URL", "")
    if not address:
        return PUBLIC_HOST if environ.get("OPENAI_API_KEY") else ""
    return urlsplit(address).netloc.rpartition("@")[2] or redacted(address)


def client_options(settings: LlmSettings, environ: Mapping[str, str]) -> dict[str, Any]:
    """What the package's clients take.

    Raises:
        ModelNotUsable: the package is not installed, or neither an endpoint nor a key is set.
    """
    if importlib.util.find_spec("openai") is None:
        raise ModelNotUsable("the openai package is not installed", remedy="Run: pip install 'mtmc-lsp[llm]'")
    address, key = environ.get("OPENAI_BASE_URL"), environ.get("OPENAI_API_KEY")
    if not address and not key:
        raise ModelNotUsable(
            "no endpoint for a model is set",
            remedy="Set OPENAI_BASE_URL (and OPENAI_API_KEY, where it wants one), as in http://localhost:8000/v1.",
        )
    return {
        "base_url": address or None,
        # Servers on one's own machine want no key, but the package wants some text there.
        "api_key": key or "none",
        "timeout": settings.timeout_seconds,
        "max_retries": settings.retries,
    }


def _take_whole(given: ChatCompletion, answer: Answer) -> None:
    if given.usage is not None:
        answer.prompt_tokens, answer.answer_tokens = given.usage.prompt_tokens, given.usage.completion_tokens
    for choice in given.choices[:1]:
        answer.text = choice.message.content or choice.message.refusal or ""
        for call in choice.message.tool_calls or ():
            answer.arguments += call.function.arguments if call.type == "function" else ""
        answer.finish = choice.finish_reason or "stop"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _room(refusal: openai.APIStatusError, most_tokens: int) -> int:
    """The tokens that the endpoint's context leaves for an answer, where it says so; else 0."""
    said = _said(refusal)
    context, used = CONTEXT.search(said), USED.search(said)
    room = int(context[1]) - int(used[1]) if context and used else 0
    return room if 0 < room < most_tokens else 0


class _Understood:
    """A refused request (400, 422) passes, for the caller to mend; all else becomes one of our errors."""

    def __init__(self, model: str, place: str, settings: LlmSettings) -> None:
        self._model = model
        self._place = place
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
        if isinstance(error, (openai.BadRequestError, openai.UnprocessableEntityError)):
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
            wait = error.response.headers.get("retry-after")
            asked = f" (it asks for {wait} s)" if wait else ""
            return ModelFailed(f"{self._place} still asked to wait after {tries} tries{asked}: {_said(error)}")
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
