"""Probes an endpoint for `mtmc doctor`: lists its models and sends a few tiny questions, without any user code."""

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
"""Maximum tokens of an answer: reasoning models need some before they answer."""
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"number": {"type": "integer", "enum": [7]}},
    "required": ["number"],
    "additionalProperties": False,
}
QUESTION = (Message("user", 'Answer with the number seven, as JSON: {"number": 7}'),)


@dataclass(frozen=True)
class Abilities:
    """Which ways of constraining an answer a model supports."""

    structured: str
    """Empty if answers follow a JSON schema, otherwise the reason why not."""
    tools: str
    """Empty if the model calls tools, otherwise the reason why not."""
    counts: bool
    """Whether the endpoint reports token counts."""


def list_models(settings: LlmSettings, environ: Mapping[str, str]) -> list[str]:
    """The names of the models that the endpoint offers.

    Raises:
        ModelNotUsable: the endpoint cannot be reached or rejects the key.
        ModelFailed: the endpoint gave no usable answer.
    """
    options = client_options(settings, environ)
    import openai

    with (
        Endpoint("", settings, environ).translated_errors(),
        openai.OpenAI(
            **{**options, "timeout": min(LIST_SECONDS, settings.timeout_seconds), "max_retries": 0}
        ) as client,
    ):
        return [item.id for item in client.models.list().data]


def probe_abilities(model: str, settings: LlmSettings, environ: Mapping[str, str]) -> Abilities:
    """Probe the abilities of the model with small questions; costs a few hundred tokens.

    Raises:
        ModelNotUsable: the endpoint, the key or the model is missing or invalid.
    """
    probe_settings = replace(settings, timeout_seconds=min(PROBE_SECONDS, settings.timeout_seconds), retries=0)
    results = {form: asyncio.run(_probe(form, model, probe_settings, environ)) for form in (STRUCTURED, TOOL)}
    structured = results[STRUCTURED][0]
    if structured:
        # Some servers accept a schema only with the older response format.
        results[OBJECT] = asyncio.run(_probe(OBJECT, model, probe_settings, environ))
        structured = results[OBJECT][0] and structured
    counts = any(answer.prompt_tokens for _, answer in results.values())
    return Abilities(structured, results[TOOL][0], counts=counts)


async def _probe(form: str, model: str, settings: LlmSettings, environ: Mapping[str, str]) -> tuple[str, Answer]:
    endpoint, answer = Endpoint(model, settings, environ), Answer()
    endpoint.only(form)
    async with endpoint.open() as client:
        try:
            await endpoint.ask(client, QUESTION, answer, schema=SCHEMA, max_tokens=PROBE_TOKENS)
        except ModelFailed as failure:
            return failure.message, answer
    if form == TOOL and not answer.arguments:
        return "it answers with text instead", answer
    try:
        is_correct = json.loads(answer.content) == {"number": 7}
    except ValueError:
        is_correct = False
    return "" if is_correct else f"it answers {' '.join(answer.content.split())[:40]!r}", answer
