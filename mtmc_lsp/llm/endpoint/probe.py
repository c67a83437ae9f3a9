"""What `mtmc doctor` finds out about an endpoint by a list and a few tiny questions: nothing of the user's is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtmc_lsp.core.chat import Message, ModelFailed
from mtmc_lsp.core.settings import LlmSettings
from mtmc_lsp.llm.endpoint.endpoint import OBJECT, STRUCTURED, TOOL, Answer, Endpoint, client_options

LIST_SECONDS = 10.0
PROBE_SECONDS = 30.0
PROBE_TOKENS = 256
"""Of an answer: models that think first need some."""
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"number": {"type": "integer", "enum": [7]}},
    "required": ["number"],
    "additionalProperties": False,
}
QUESTION = (Message("user", 'Answer with the number seven, as JSON: {"number": 7}'),)


@dataclass(frozen=True)
class Abilities:
    """How a model can be held to an answer."""

    structured: str
    """Whether it keeps to a JSON schema: empty where it does, else why not."""
    tools: str
    """Whether it calls a tool: empty where it does, else why not."""
    counts: bool
    """Whether tokens are counted."""


def look_at_endpoint(settings: LlmSettings, environ: Mapping[str, str]) -> list[str]:
    """The models that the endpoint offers.

    Raises:
        ModelNotUsable: it cannot be reached or refuses the key.
        ModelFailed: it gave no usable answer.
    """
    options = client_options(settings, environ)
    import openai

    with (
        Endpoint("", settings, environ).understood(),
        openai.OpenAI(
            **{**options, "timeout": min(LIST_SECONDS, settings.timeout_seconds), "max_retries": 0}
        ) as client,
    ):
        return [item.id for item in client.models.list().data]


def abilities(model: str, settings: LlmSettings, environ: Mapping[str, str]) -> Abilities:
    """What the model can do, by asking it; costs some hundred tokens.

    Raises:
        ModelNotUsable: it cannot be asked at all.
    """
    quick = replace(settings, timeout_seconds=min(PROBE_SECONDS, settings.timeout_seconds), retries=0)
    found = {form: asyncio.run(_asked(form, model, quick, environ)) for form in (STRUCTURED, TOOL)}
    structured = found[STRUCTURED][0]
    if structured:
        # Some servers take a schema by the older name alone.
        found[OBJECT] = asyncio.run(_asked(OBJECT, model, quick, environ))
        structured = found[OBJECT][0] and structured
    counts = any(answer.prompt_tokens for _, answer in found.values())
    return Abilities(structured, found[TOOL][0], counts=counts)


async def _asked(form: str, model: str, settings: LlmSettings, environ: Mapping[str, str]) -> tuple[str, Answer]:
    endpoint, answer = Endpoint(model, settings, environ), Answer()
    endpoint.only(form)
    async with endpoint.open() as client:
        try:
            await endpoint.ask(client, QUESTION, answer, schema=SCHEMA, most_tokens=PROBE_TOKENS)
        except ModelFailed as failure:
            return failure.message, answer
    if form == TOOL and not answer.arguments:
        return "it answers in words instead", answer
    try:
        fits = json.loads(answer.whole) == {"number": 7}
    except ValueError:
        fits = False
    return "" if fits else f"it answers {' '.join(answer.whole.split())[:40]!r}", answer
