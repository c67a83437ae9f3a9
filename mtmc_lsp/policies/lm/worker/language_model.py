"""Loading of the base model and its adapter. transformers and peft are optional, so they are imported at the call."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.core.errors import EnvironmentNotAble, RequestError
from mtmc_lsp.policies.lm.policy_folder import ADAPTER, MODEL, TRAIN_AGAIN, LmPolicyDescription

INSTALL = 'Install them for this interpreter: pip install "mtmc-lsp[learn]"'
INSTALL_GGUF = "Install it for this interpreter: pip install gguf"
NAME_A_MODEL = (
    "Name a model on the Hugging Face hub, a folder with a model of transformers, or a GGUF file "
    "(which needs the package gguf). Without a network, only local files and models in the cache work."
)


@dataclass
class LanguageModel:
    """A causal language model with its tokenizer."""

    causal: Any
    """The model of transformers with its output layer; adapters are inside its layers."""
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        device: torch.device = next(self.causal.parameters()).device
        return device

    @property
    def context(self) -> int:
        """The most tokens that it can read."""
        return int(getattr(self.causal.config, "max_position_embeddings", 2048))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special ones."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens


def load_policy(folder: Path, description: LmPolicyDescription, device: str) -> LanguageModel:
    """Load the model of a trained policy, with its adapter if it has one.

    Raises:
        EnvironmentNotAble: a package is missing.
        RequestError: the model or its adapter cannot be loaded.
    """
    if not description.model:
        try:
            return load_base(str(folder / MODEL), device)
        except RequestError as error:
            raise RequestError(error.message, remedy=TRAIN_AGAIN) from None
    model = load_base(description.model, device, layers=description.layers)
    load_adapter(model, folder / ADAPTER)
    return model


def load_base(name: str, device: str, *, layers: int = 0) -> LanguageModel:
    """Load a model in float32, also on a GPU: PPO compares probabilities of one text from two batches of different sizes, and
    in bfloat16 their sums over tokens would differ by as much as a policy may move.

    Args:
        layers: only the first layers of the model are kept; 0 for all.

    Raises:
        EnvironmentNotAble: a package is missing.
        RequestError: the model cannot be loaded.
    """
    transformers = package("transformers")
    transformers.logging.disable_progress_bar()
    where, options = _place(name)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
        causal = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
    except ImportError as error:
        # The package gguf is no part of the extra, since models of the hub do not need it.
        remedy = INSTALL_GGUF if "gguf_file" in options else INSTALL
        raise EnvironmentNotAble(f"the model {name} needs another package: {_line(error)}", remedy=remedy) from None
    except Exception as error:
        # transformers also raises errors of the hub, of JSON and of safetensors.
        raise RequestError(f"cannot load the language model {name}: {_line(error)}", remedy=NAME_A_MODEL) from None
    if layers:
        _cut(causal, layers, name)
    return LanguageModel(causal.to(device).eval(), tokenizer)


def _cut(causal: Any, layers: int, name: str) -> None:
    """Keep the first layers. The output layer then reads what the last of them writes."""
    known = getattr(causal.base_model, "layers", None)
    if known is None or layers > len(known):
        has = f"has {len(known)} layers" if known is not None else "has no list of layers"
        raise RequestError(f"the language model {name} {has}, so {layers} cannot be kept", remedy="Name fewer layers.")
    causal.base_model.layers = known[:layers]
    causal.config.num_hidden_layers = layers


def add_adapter(model: LanguageModel, *, rank: int, alpha: int, dropout: float) -> Any:
    """Add a new LoRA adapter to all linear layers of attention and MLP. Returns peft's model, which can save it."""
    peft = package("peft")
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model.causal, config)


def load_adapter(model: LanguageModel, folder: Path) -> None:
    """Merge a trained adapter into the model, so that scoring costs no more than without it.

    Raises:
        RequestError: the adapter is damaged or belongs to another model.
    """
    peft = package("peft")
    try:
        model.causal = peft.PeftModel.from_pretrained(model.causal, str(folder)).merge_and_unload()
    except Exception as error:
        raise RequestError(
            f"cannot load the adapter {folder}: {_line(error)}",
            remedy="It is damaged or belongs to another language model. Train the policy again.",
        ) from None


def package(name: str) -> Any:
    """A package that is optional.

    Raises:
        EnvironmentNotAble: it cannot be imported.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"the lm policy needs {name}, which {sys.executable} cannot import ({_line(error)})"
        raise EnvironmentNotAble(message, remedy=INSTALL) from None


def _place(name: str) -> tuple[str, dict[str, Any]]:
    """What transformers loads, and the options for it."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise RequestError(f"there is no model file {name}", remedy=NAME_A_MODEL)
        return str(path.parent), {"gguf_file": path.name, "local_files_only": True}
    if path.is_dir():
        return str(path), {"local_files_only": True}
    if path.is_absolute() or name.startswith("."):
        raise RequestError(f"there is no folder {name}", remedy=NAME_A_MODEL)
    return name, {}


def _line(error: Exception) -> str:
    """The first line of a message; those of transformers are long."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
