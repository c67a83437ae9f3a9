"""The folder of a trained ``lm`` policy: a description, and the LoRA adapter of its language model or a complete small model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mtmc_lsp import __version__
from mtmc_lsp.core.action import GRAPH_KINDS
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.policies.lm import prompt

DESCRIPTION = "policy.json"
ADAPTER = "adapter"
"""The adapter's folder, as peft writes it."""
MODEL = "model"
"""The folder of a model that was new, as transformers writes it."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")
CATALOGUE = tuple(sorted(kind.value for kind in GRAPH_KINDS))
"""The action kinds of this version."""
TRAIN_AGAIN = "Train it again with this version: mtmc train policy --kind lm."
NOT_A_POLICY = "Name the folder `policy` that `mtmc train policy --kind lm --out DIR` writes below DIR."


class Normalisation(Enum):
    """How the log-probabilities of an action's tokens become its score. The softmax over the legal actions follows."""

    SUM = "sum"
    """The product of the probabilities, as in TWOSOME (arXiv 2401.14151) without normalisation. Favours short texts."""
    TOKEN_MEAN = "token-mean"
    """Divided by the number of tokens."""
    WORD_MEAN = "word-mean"
    """Divided by the number of words: longer words are not worth more."""


@dataclass(frozen=True)
class LmPolicyDescription:
    """Everything besides the weights that scoring needs."""

    model: str
    """The base model: a name on the Hugging Face hub, a folder or a GGUF file. Empty if the policy contains its model."""
    layers: int = 0
    """The number of the base model's first layers that are used; 0 for all."""
    normalisation: Normalisation = Normalisation.SUM
    history: bool = True
    """Whether the state tells the steps so far."""
    hardware: bool = True
    """Whether the state tells the device."""
    state_tokens: int = prompt.STATE_TOKENS
    catalogue: tuple[str, ...] = CATALOGUE
    """The action kinds at training."""
    text_format: int = prompt.FORMAT
    probe: tuple[float, ...] = ()
    """What :func:`mtmc_lsp.policies.lm.worker.scoring.probe` gave after the training; empty in policies of earlier releases."""
    devices: tuple[str, ...] = ()
    """The GPUs of the training data; empty if nothing was timed."""
    names: bool = True
    """Whether texts name operations, shapes and configurations; otherwise classes and numbers alone."""
    stop_margin: float = 0.0
    """Subtracted from the logarithm of STOP's probability: a search that ends too early loses speedup."""
    version: str = __version__
    """Of mtmc-lsp at training."""


def write_description(folder: Path, description: LmPolicyDescription) -> None:
    """Write the description; the weights are already there."""
    temporary = folder / f"{DESCRIPTION}.tmp"
    temporary.write_text(json.dumps(to_json(description), indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / DESCRIPTION)


def read_description(folder: Path) -> LmPolicyDescription:
    """The description of the policy in a folder.

    Raises:
        RequestError: the folder holds no policy, a damaged one, or one that does not fit this version.
    """
    path = folder / DESCRIPTION
    where = Location(str(path if folder.is_dir() else folder))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise RequestError("there is no policy of kind lm here", where=where, remedy=NOT_A_POLICY) from None
    try:
        description = from_json(LmPolicyDescription, json.loads(text))
        if description.layers < 0 or description.state_tokens < 1:
            raise ValueError("a number is out of range")
    except (KeyError, TypeError, ValueError) as error:
        message = f"this is not the description of an lm policy, or it is damaged ({error})"
        raise RequestError(message, where=where, remedy=TRAIN_AGAIN) from None
    if description.text_format != prompt.FORMAT:
        raise RequestError(
            f"the policy was trained with texts of format {description.text_format}; this version writes {prompt.FORMAT}",
            where=where,
            remedy=TRAIN_AGAIN,
        )
    if description.catalogue != CATALOGUE:
        changed = ", ".join(sorted(set(description.catalogue) ^ set(CATALOGUE)))
        raise RequestError(
            f"the policy was trained for other actions than this version has; they differ in {changed}",
            where=where,
            remedy=TRAIN_AGAIN,
        )
    part, files = (ADAPTER, ADAPTER_FILES) if description.model else (MODEL, MODEL_FILES)
    missing = [name for name in files if not (folder / part / name).is_file()]
    if missing:
        raise RequestError(f"the policy has no {part}/{missing[0]}", where=Location(str(folder)), remedy=TRAIN_AGAIN)
    return description
