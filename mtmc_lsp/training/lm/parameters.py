"""All hyper-parameters of the training, each with its source.

Sources: *released* are the defaults of the code that the authors of QiMeng-Kernel (arXiv 2511.20100) published; *paper* is that
paper. Where ours differ, the reason is given. None of ours was tuned on measured data yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.policies.lm.policy_folder import Normalisation
from mtmc_lsp.policies.lm.prompt import STATE_TOKENS

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""On the Hugging Face hub; Apache-2.0."""


@dataclass(frozen=True)
class Rewards:
    """The reward of one step. Stages add up: a faster version gets ``compiles + correct + faster``."""

    not_compiled: float = -1.0
    """Paper. Also for an action that cannot be written, and for one that ran into a limit."""
    compiles: float = 0.1
    """Paper."""
    wrong: float = -0.5
    """Paper."""
    correct: float = 0.5
    """Paper."""
    faster: float = 1.0
    """Paper: faster than the version before."""
    step_cost: float = 0.1
    """Times the number of the step. The paper has such a decay without its coefficient. With ours, a correct version that is not
    faster pays until the sixth step."""

    def of(self, outcome: Outcome, step: int, *, staged: bool) -> float:
        """The reward of step number ``step``, from 1.

        Args:
            staged: whether compiling and correctness count; otherwise a gain in speed alone does.
        """
        reward = -self.step_cost * step
        if staged:
            if outcome in (Outcome.NOT_LEGAL, Outcome.COMPILE_ERROR, Outcome.OUT_OF_TIME):
                reward += self.not_compiled
            else:
                reward += self.compiles + (self.wrong if outcome is Outcome.WRONG else self.correct)
        return reward + self.faster if outcome is Outcome.FASTER else reward


@dataclass(frozen=True)
class Ablation:
    """What a training leaves out, to measure what it contributes."""

    history: bool = True
    """Whether states tell the steps so far."""
    hardware: bool = True
    """Whether states tell the device."""
    staged_rewards: bool = True
    """Whether compiling and correctness are rewarded."""
    supervised: bool = True
    """Whether the training starts with the best paths of the trees."""
    data: float = 1.0
    """Share of the training programs that is used, 0 to 1."""


WITHOUT: Mapping[str, str] = {
    "history": "history",
    "device": "hardware",
    "compile-reward": "staged_rewards",
    "supervised": "supervised",
}
"""Names of ablations on the command line, and the fields that they turn off."""


def ablation_of(without: Sequence[str], share: float) -> Ablation:
    """The ablation that a command line asks for.

    Raises:
        RequestError: an unknown name, or a share that is not above 0 and at most 1.
    """
    unknown = [name for name in without if name not in WITHOUT]
    if unknown:
        raise RequestError(f"--without {unknown[0]} does not exist", remedy=f"Choose from {', '.join(WITHOUT)}.")
    if not 0 < share <= 1:
        raise RequestError(f"--share {share:g} is not a share", remedy="Choose a number above 0 and at most 1.")
    return replace(Ablation(data=share), **{WITHOUT[name]: False for name in without})


NEW_MODELS: Mapping[str, int] = {"1M": 128, "4M": 256, "15M": 512}
"""Sizes of new models, named by their millions of weights, and the widths of their layers."""


@dataclass(frozen=True)
class LmParameters:
    """The complete definition of a training. The same parameters, data and machine give the same policy."""

    model: str
    """The base model: a name on the Hugging Face hub, a folder or a GGUF file. Empty for a new model."""
    layers: int = 0
    """Number of the base model's first layers to use; 0 for all."""
    new_model: str = ""
    """Size of a new model, a key of :data:`NEW_MODELS`. It starts with random weights and trains them all."""
    seed: int = 77
    """Released."""
    normalisation: Normalisation = Normalisation.WORD_MEAN
    """Released: the sum. With it, an untrained SmolLM2-135M gives nearly everything to one short text (entropy of 0.002 nats in
    states of ``scripts/try_lm_policy.py``), and PPO has nothing to explore."""
    state_tokens: int = STATE_TOKENS
    names: bool = True
    """Whether texts name operations, shapes and configurations."""
    lora_rank: int = 16
    """Of LoRA on all linear layers of attention and MLP. Rank and alpha are common choices."""
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    """None: with dropout, the probabilities before and after an update would differ by chance."""

    supervised_epochs: int = 2
    supervised_batch: int = 16
    supervised_rate: float = 2e-4
    """Learning rate; usual for LoRA. Falls linearly to a tenth."""

    target_temperature: float = 0.1
    """Of the probabilities that the supervised start imitates: a choice that reaches 10 % more is about 2.7 times as probable. So
    actions that are equally good up to noise are not held against each other."""
    stop_gain: float = 0.02
    """What STOP is worth beside actions that gain, as a logarithm of a speedup: as for the ranker, 2 %."""

    regret_weight: float = 1.0
    """Weight of what a draw from the probabilities loses on average, as a logarithm of a speedup, beside their cross-entropy:
    so a wrong choice counts by what it costs."""
    text_weight: float = 0.0
    """Weight of the mean cross-entropy of a token of the best actions' texts, beside that of the choice."""

    warmup_updates: int = 8
    """Updates of the value head alone before PPO: 8 times 16 walks of about 4 steps are 512 steps (released)."""
    ppo_updates: int = 200
    walks: int = 16
    """Walks through trees per update."""
    most_steps: int = 8
    """Longest walk (released)."""
    epochs: int = 1
    """Passes over the steps of an update (released)."""
    minibatch: int = 16
    """States per step of the optimiser."""
    policy_rate: float = 5e-5
    """Learning rate; falls linearly to 0. Released: 1e-6 over a million steps; ours has some ten thousand steps."""
    value_rate: float = 1e-3
    """Learning rate of the value head. Released: 5e-5, for as many more steps."""
    value_epochs: int = 4
    """Passes of the value head over the steps of an update. It reads stored hidden states, so a pass costs almost nothing."""
    gamma: float = 0.99
    """Discount (released)."""
    gae_lambda: float = 0.95
    """Of generalised advantage estimation, arXiv 1506.02438 (released)."""
    clip: float = 0.2
    """Of the probability ratio, arXiv 1707.06347 (released)."""
    entropy: float = 0.01
    """Weight of the entropy bonus (released)."""
    most_gradient: float = 0.5
    """Gradients are clipped to this norm (released)."""
    target_kl: float = 0.02
    """An update ends early when the policy has moved this far (released)."""

    microbatch: int = 8
    """States that are read at once; a matter of memory."""
    validate_every: int = 20
    """Updates between two validations."""
    most_validated: int = 64
    """Held-out states and trees of one validation."""
    rewards: Rewards = field(default_factory=Rewards)
    ablation: Ablation = field(default_factory=Ablation)


NEW_MODEL_RATES: Mapping[str, Any] = {
    "names": False,
    "text_weight": 0.3,
    "supervised_epochs": 3,
    "supervised_rate": 1e-3,
    "policy_rate": 1e-4,
}
"""What differs for a new model: all its weights are random, so they move further than those of an adapter. On the
transitions of an H200, choices on held-out families became no better after the second epoch."""


def lm_parameters(
    model: str,
    *,
    layers: int = 0,
    new_model: str = "",
    seed: int = LmParameters.seed,
    epochs: int | None = None,
    updates: int = LmParameters.ppo_updates,
    walks: int = LmParameters.walks,
    ablation: Ablation | None = None,
) -> LmParameters:
    """The parameters that a command line asks for. A new model has higher learning rates and more epochs than an adapter.

    Args:
        epochs: of the supervised start; by default those of the kind of model.
        walks: per update by PPO; with more than usual, a step of the optimiser also sees more of them.

    Raises:
        RequestError: the model is named in two ways, or the new model's size does not exist.
    """
    if new_model and (model or layers):
        other = "--model" if model else "--layers"
        remedy = f"Leave out {other} to train a new model, or --new-model to train an adapter of an existing one."
        raise RequestError(f"--new-model and {other} exclude each other", remedy=remedy)
    if new_model and new_model not in NEW_MODELS:
        raise RequestError(f"--new-model {new_model} does not exist", remedy=f"Choose {' or '.join(NEW_MODELS)}.")
    parameters = LmParameters(
        "" if new_model else model or DEFAULT_MODEL,
        layers=layers,
        new_model=new_model,
        seed=seed,
        ppo_updates=updates,
        walks=walks,
        minibatch=max(LmParameters.minibatch, walks),
        ablation=ablation or Ablation(),
    )
    if new_model:
        parameters = replace(parameters, **NEW_MODEL_RATES)
    return parameters if epochs is None else replace(parameters, supervised_epochs=epochs)
