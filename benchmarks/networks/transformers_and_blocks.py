"""Transformer networks and blocks of transformers in inference: bfloat16, random weights, batches of 1, 8 and 64."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, MambaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mamba.modeling_mamba import MambaMixer


class Network(nn.Module):
    """A network in evaluation mode."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.bfloat16().eval().requires_grad_(False)


class LlamaBlock(Network):
    """A decoder layer of Llama 3 8B, with its rotary embedding."""

    def __init__(self) -> None:
        config = LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=1,
            attn_implementation="sdpa",
        )
        super().__init__(LlamaDecoderLayer(config, 0))
        self.rotary = LlamaRotaryEmbedding(config)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        result = self.network(x, position_ids=positions, position_embeddings=self.rotary(x, positions))
        return result[0] if isinstance(result, tuple) else result


class UNetBlock(Network):
    """A residual block of a diffusion model's U-Net."""

    def __init__(self) -> None:
        super().__init__(
            nn.ModuleDict(
                {
                    "norm1": nn.GroupNorm(32, 320),
                    "conv1": nn.Conv2d(320, 640, 3, padding=1),
                    "time": nn.Linear(1280, 640),
                    "norm2": nn.GroupNorm(32, 640),
                    "conv2": nn.Conv2d(640, 640, 3, padding=1),
                    "skip": nn.Conv2d(320, 640, 1),
                }
            )
        )

    def run(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        parts = self.network
        hidden = parts["conv1"](nn.functional.silu(parts["norm1"](x)))
        hidden = hidden + parts["time"](nn.functional.silu(time))[:, :, None, None]
        hidden = parts["conv2"](nn.functional.silu(parts["norm2"](hidden)))
        return parts["skip"](x) + hidden


class BertBaseOf1(Network):
    def __init__(self) -> None:
        super().__init__(BertModel(BertConfig(attn_implementation="sdpa"), add_pooling_layer=False))

    # mtmc: ids=i64[B,S]@0..30521 B=1 S=128
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.network(input_ids=ids).last_hidden_state


class Gpt2Of1(Network):
    def __init__(self) -> None:
        super().__init__(GPT2Model(GPT2Config(attn_implementation="sdpa")))

    # mtmc: ids=i64[B,S]@0..50256 B=1 S=256
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.network(input_ids=ids, use_cache=False).last_hidden_state


class LlamaBlockOf1(LlamaBlock):
    # mtmc: x=bf16[B,S,4096] B=1 S=512
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class MambaBlockOf1(Network):
    def __init__(self) -> None:
        super().__init__(MambaMixer(MambaConfig(hidden_size=768), 0))

    # mtmc: x=bf16[B,S,768] B=1 S=256
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class UNetBlockOf1(UNetBlock):
    # mtmc: x=bf16[B,320,64,64] time=bf16[B,1280] B=1
    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.run(x, time)


class BertBaseOf8(Network):
    def __init__(self) -> None:
        super().__init__(BertModel(BertConfig(attn_implementation="sdpa"), add_pooling_layer=False))

    # mtmc: ids=i64[B,S]@0..30521 B=8 S=128
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.network(input_ids=ids).last_hidden_state


class Gpt2Of8(Network):
    def __init__(self) -> None:
        super().__init__(GPT2Model(GPT2Config(attn_implementation="sdpa")))

    # mtmc: ids=i64[B,S]@0..50256 B=8 S=256
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.network(input_ids=ids, use_cache=False).last_hidden_state


class LlamaBlockOf8(LlamaBlock):
    # mtmc: x=bf16[B,S,4096] B=8 S=512
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class MambaBlockOf8(Network):
    def __init__(self) -> None:
        super().__init__(MambaMixer(MambaConfig(hidden_size=768), 0))

    # mtmc: x=bf16[B,S,768] B=8 S=256
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class UNetBlockOf8(UNetBlock):
    # mtmc: x=bf16[B,320,64,64] time=bf16[B,1280] B=8
    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.run(x, time)


class BertBaseOf64(Network):
    def __init__(self) -> None:
        super().__init__(BertModel(BertConfig(attn_implementation="sdpa"), add_pooling_layer=False))

    # mtmc: ids=i64[B,S]@0..30521 B=64 S=128
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.network(input_ids=ids).last_hidden_state


class Gpt2Of64(Network):
    def __init__(self) -> None:
        super().__init__(GPT2Model(GPT2Config(attn_implementation="sdpa")))

    # mtmc: ids=i64[B,S]@0..50256 B=64 S=256
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.network(input_ids=ids, use_cache=False).last_hidden_state


class LlamaBlockOf64(LlamaBlock):
    # mtmc: x=bf16[B,S,4096] B=64 S=512
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class MambaBlockOf64(Network):
    def __init__(self) -> None:
        super().__init__(MambaMixer(MambaConfig(hidden_size=768), 0))

    # mtmc: x=bf16[B,S,768] B=64 S=256
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class UNetBlockOf64(UNetBlock):
    # mtmc: x=bf16[B,320,64,64] time=bf16[B,1280] B=64
    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.run(x, time)
