"""Next-token probabilities at a temperature, with no top-k cut."""

import torch


# mtmc: logits=f32[N,V] N=512 V=128256
def temperature_softmax(logits: torch.Tensor, temperature: float = 0.7) -> torch.Tensor:
    scaled = logits / temperature
    return torch.softmax(scaled, dim=-1)
