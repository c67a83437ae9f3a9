"""A tiny language model with random weights and one token per byte, made on the spot: no download."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mtmc_lsp.policies.lm.policy_folder import ADAPTER, LmPolicyDescription, Normalisation, write_description
from mtmc_lsp.policies.lm.worker.language_model import LanguageModel, add_adapter, load_base
from mtmc_lsp.policies.lm.worker.scoring import probe


@functools.cache
def model_folder() -> Path:
    """A folder with a Llama of 60,000 parameters; removed when the process ends."""
    folder = tempfile.TemporaryDirectory()
    _kept.append(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder.name)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    # With the usual deviation of 0.02 all probabilities are nearly equal, and errors would not show.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder.name)
    return Path(folder.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def tiny_model() -> LanguageModel:
    return load_base(str(model_folder()), "cpu")


def write_policy(folder: Path, normalisation: Normalisation = Normalisation.SUM) -> Path:
    """A policy folder with an adapter whose weights are random, so that it changes every probability."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    adapted = add_adapter(tiny_model(), rank=2, alpha=4, dropout=0.0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(folder / ADAPTER))
    model = LanguageModel(adapted.base_model.model, tiny_model().tokenizer)
    write_description(folder, LmPolicyDescription(str(model_folder()), normalisation=normalisation, probe=probe(model)))
    return folder


def adapted_model(folder: Path) -> LanguageModel:
    """The base model with the adapter of a policy beside its weights, instead of merged into them."""
    import peft

    model = tiny_model()
    peft.PeftModel.from_pretrained(model.causal, str(folder / ADAPTER))
    return model
