"""The JSON documents that ``--json`` prints."""

from __future__ import annotations

import json
import math
from typing import Any

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import SCHEMA, RunResult


def run_document(result: RunResult) -> str:
    """A run; it carries its schema itself."""
    return _dump(to_json(result))


def document(**values: object) -> str:
    """Any other answer."""
    return _dump({"schema": SCHEMA, **{name: to_json(value) for name, value in values.items()}})


def error_document(error: MtmcError) -> str:
    """A request that could not be met."""
    return _dump({"schema": SCHEMA, "error": error.to_json()})


def _dump(value: Any) -> str:
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no infinities and no NaN; such a number becomes ``null``."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
