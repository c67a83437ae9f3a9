"""The file of a trained ranker: a JSON header and the trees as LightGBM writes them, compressed by gzip.

The header states everything that a model depends on, so that a file for another version of this tool is refused with a reason.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from mtmc_lsp.core.action import GRAPH_KINDS
from mtmc_lsp.core.errors import EnvironmentNotAble, Location, MtmcError, RequestError
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.policies.feature_names import FEATURE_VERSION, FEATURES

FORMAT = "mtmc-policy 1"
RANKER = "ranker"
LM_DESCRIPTION = "policy.json"
"""A file in the folder of a policy of kind lm."""
SHIPPED = "ranker.policy"
"""Name of the model in the package's ``policies/data``."""
MAX_FILE_BYTES = 1 << 20
"""Maximum size of a model file."""
MAX_TEXT_BYTES = 32 << 20
"""Maximum size of its uncompressed text."""
TRAIN = "mtmc train policy --kind ranker --data DIR --out FILE"
INSTALL = "Install it: pip install 'mtmc-lsp[learn]'."


@dataclass(frozen=True)
class ModelHeader:
    """What a ranker was trained for and on."""

    features: tuple[str, ...]
    """Columns of a row, in order; fewer than all in ablations."""
    temperature: float
    """Scores are divided by it before the softmax."""
    stop_gain: float
    """STOP ranks above actions that gain less than this share."""
    stop_margin: float = 0.0
    """Subtracted from STOP's score, so that a search ends only when the model is sure."""
    experience: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Gains and tries of each kind of action in similar states of the training data."""
    device: str = ""
    """Names of the GPUs that timed the training data, joined by commas; empty if nothing was timed."""
    environment: str = ""
    """Versions of torch, triton and mtmc-lsp that made the training data."""
    commit: str = ""
    """Commit of mtmc-lsp that trained the model."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Programs, groups and actions of the training data."""
    command: str = ""
    """The command that trained the model."""
    format: str = FORMAT
    kind: str = RANKER
    feature_version: int = FEATURE_VERSION
    action_kinds: tuple[str, ...] = tuple(kind.value for kind in GRAPH_KINDS)
    """The catalogue of actions."""
    digest: str = ""
    """SHA-256 of the text of the trees."""


@dataclass(frozen=True)
class ModelFile:
    """A header and the text of its trees."""

    header: ModelHeader
    trees: str

    def to_bytes(self) -> bytes:
        """The content of the file; the same model gives the same bytes."""
        header = replace(self.header, digest=_digest(self.trees))
        text = json.dumps(to_json(header)) + "\n" + self.trees
        return gzip.compress(text.encode(), compresslevel=9, mtime=0)


def shipped_model() -> Path | None:
    """The model that this version ships; None if it ships none."""
    path = Path(str(resources.files("mtmc_lsp.policies"))) / "data" / SHIPPED
    return path if path.is_file() else None


def model_path(setting: str) -> Path:
    """The model file that the setting ``policy-file`` names, or the shipped one.

    Raises:
        RequestError: the setting is empty and no model is shipped.
    """
    path = Path(setting).expanduser() if setting else shipped_model()
    if path is None:
        raise RequestError(
            "this version ships no trained ranker", remedy=f"Train one ({TRAIN}) and name it: policy-file = FILE."
        )
    return path


def read_model(path: Path) -> ModelFile:
    """Read and check a model file.

    Raises:
        RequestError: there is no such file, it is damaged or something else, or it was trained for another version's actions
            or features.
    """
    where = Location(str(path))
    if (path / LM_DESCRIPTION).is_file():
        raise RequestError(
            "this is a policy of kind 'lm', not a ranker", where=where, remedy="Choose it with --planner lm."
        )
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RequestError(
            f"the policy file cannot be read: {error.strerror or error}",
            where=where,
            remedy=f"Name another file with --policy-file, or train one: {TRAIN}.",
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(
            f"the policy file has more than {MAX_FILE_BYTES >> 20} MB, which is more than a ranker has",
            where=where,
            remedy=f"Name a file that `{TRAIN}` wrote.",
        )
    model = _decoded(data, where)
    _check(model.header, where)
    return model


def _decoded(data: bytes, where: Location) -> ModelFile:
    try:
        text = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MAX_TEXT_BYTES).decode()
        first, _, trees = text.partition("\n")
        values = json.loads(first)
        if not isinstance(values, dict) or not str(values.get("format", "")).startswith("mtmc-policy"):
            raise TypeError("no header")
        if values["format"] != FORMAT:
            raise _other_version(f"has the format {str(values['format'])!r}, and this version reads {FORMAT!r}", where)
        if values.get("kind") != RANKER:
            raise _other_kind(str(values.get("kind")), where)
        header = from_json(ModelHeader, values)
        if header.digest != _digest(trees):
            raise TypeError("the text differs from its digest")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, ValueError, TypeError, RecursionError):
        raise RequestError(
            "the policy file is damaged, or it is not a policy file",
            where=where,
            remedy=f"Copy it again, or train one: {TRAIN}.",
        ) from None
    return ModelFile(header, trees)


def _check(header: ModelHeader, where: Location) -> None:
    kinds = tuple(kind.value for kind in GRAPH_KINDS)
    if header.action_kinds != kinds:
        other = sorted(set(header.action_kinds) ^ set(kinds)) or ["another order of actions"]
        raise _other_version(f"was trained for another catalogue of actions (different: {', '.join(other)})", where)
    if header.feature_version != FEATURE_VERSION or not set(header.features) <= set(FEATURES):
        raise _other_version(
            f"was trained on version {header.feature_version} of the features, and this version has {FEATURE_VERSION}",
            where,
        )


def _other_kind(kind: str, where: Location) -> MtmcError:
    return RequestError(
        f"the policy file contains a policy of kind {kind!r}, not a ranker",
        where=where,
        remedy=f"Name a file that `{TRAIN}` wrote.",
    )


def _other_version(problem: str, where: Location) -> MtmcError:
    return RequestError(
        f"the policy file {problem}",
        where=where,
        remedy=f"Train it again with this version of mtmc-lsp: {TRAIN}.",
    )


def require_lightgbm() -> None:
    """Check that LightGBM can be imported.

    Raises:
        EnvironmentNotAble: it is not installed, or its library does not load.
    """
    try:
        import lightgbm  # noqa: F401
    except ImportError:
        raise EnvironmentNotAble("the ranker needs LightGBM, which is not installed", remedy=INSTALL) from None
    except OSError as error:
        raise EnvironmentNotAble(
            f"the library of LightGBM does not load: {error}", remedy="Install libgomp1, or LightGBM again."
        ) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
