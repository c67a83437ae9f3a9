"""The JSON documents that ``--json`` prints."""

from __future__ import annotations

import json
import math
from typing import Any

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import SCHEMA, RunResult


def run_document(result: RunResult) -> str:
    """JSON of a run; the run contains the schema version."""
    return _dump(to_json(result))


def document(**values: object) -> str:
    """JSON of any other result."""
    return _dump({"schema": SCHEMA, **{name: to_json(value) for name, value in values.items()}})


def error_document(error: MtmcError) -> str:
    """JSON of an error."""
    return _dump({"schema": SCHEMA, "error": error.to_json()})


def _dump(value: Any) -> str:
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by ``None``."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
