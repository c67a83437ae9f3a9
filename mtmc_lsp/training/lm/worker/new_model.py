"""A new language model: a small Llama with random weights, and a vocabulary made from the texts of the training trees.

It costs a fraction of a pre-trained model, so that a CPU can train it. It knows nothing but the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mtmc_lsp.policies.lm.action_text import STOP_TEXT
from mtmc_lsp.policies.lm.numbers import choices_text
from mtmc_lsp.policies.lm.prompt import QUESTION, state_text
from mtmc_lsp.policies.lm.worker.language_model import LanguageModel, package
from mtmc_lsp.training.lm.environment import edge_texts, tried
from mtmc_lsp.training.lm.parameters import NEW_MODELS
from mtmc_lsp.training.lm.tree import DecisionTree

VOCABULARY = 2048
"""Most tokens: the 256 bytes, and the most frequent pieces of words."""
CONTEXT = 2048
"""Most tokens of a state and an action."""
HEAD_SIZE = 32
LAYERS = 4
DEVIATION = 0.02
"""Of random weights, as usual for Llama."""


def new_model(size: str, trees: Sequence[DecisionTree], seed: int, device: str) -> LanguageModel:
    """A model with random weights. The same trees and seed give the same model.

    Args:
        size: a member of :data:`NEW_MODELS`.

    Raises:
        EnvironmentNotAble: transformers is not installed.
    """
    transformers = package("transformers")
    tokenizer = _tokenizer(transformers, _texts(trees))
    width = NEW_MODELS[size]
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // HEAD_SIZE,
        num_key_value_heads=width // HEAD_SIZE,
        max_position_embeddings=CONTEXT,
        initializer_range=DEVIATION,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    causal = transformers.LlamaForCausalLM(config)
    return LanguageModel(causal.to(device).eval(), tokenizer)


def _texts(trees: Iterable[DecisionTree]) -> list[str]:
    """What states and actions are made of, each text once."""
    texts = {STOP_TEXT, QUESTION, state_text("", "", "", [], "")}
    for tree in trees:
        texts |= {tree.device, tree.task}
        for node in tree.nodes.values():
            texts.add(node.schedule)
            texts |= {f" {text}" for text in edge_texts(node, node.edges)}
            texts.add(choices_text([edge.numbers for edge in node.edges], node.predicted_us))
            texts |= {tried(edge).text for edge in node.edges}
    return sorted(texts)


def _tokenizer(transformers: Any, texts: Sequence[str]) -> Any:
    # transformers depends on it.
    tokenizers = package("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
