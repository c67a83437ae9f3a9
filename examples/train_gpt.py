"""A small GPT (about 30 M parameters) that learns generated text; its norms, gates, rotation and loss can get kernels.

    mtmc optimize examples/train_gpt.py --all --apply    # kernels for both passes of the marked functions
    python examples/train_gpt.py --steps 300             # tokens per second, peak memory and the loss as JSON lines

The text is arithmetic (``17+25=42;``), so that the loss shows whether the model learns.
"""

import argparse
import json
import random
import time

import torch
import torch.nn.functional as F
from torch import nn

LETTERS = "0123456789+=;"


# mtmc: x=bf16[N,D] weight=bf16[D] N=8192 D=512 grad=x,weight
def rms_norm(x, weight, eps=1e-6):
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return hidden.to(x.dtype) * weight


# mtmc: gate=bf16[N,I] up=bf16[N,I] N=8192 I=1408 grad=gate,up
def gated(gate, up):
    return F.silu(gate) * up


# mtmc: x=bf16[B,H,S,64] cos=bf16[S,64] sin=bf16[S,64] B=32 H=8 S=256 grad=x
def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


# mtmc: logits=bf16[N,V] target=i64[N]@0..V-1 N=8192 V=8192 grad=logits
def token_loss(logits, target):
    return F.cross_entropy(logits.float(), target)


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        normed = rms_norm(x.view(-1, width), self.norm1).view_as(x)
        split = self.qkv(normed).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2).contiguous() for part in split.unbind(2))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(rms_norm(x.view(-1, width), self.norm2)).chunk(2, -1)
        return x + self.down(gated(gate.contiguous(), up.contiguous())).view_as(x)


class Gpt(nn.Module):
    def __init__(self, vocabulary=8192, width=512, heads=8, layers=8, inner=1408, length=256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(rms_norm(x.view(-1, x.shape[-1]), self.norm))
        return token_loss(logits, targets.reshape(-1))


def batches(size, length, seed, device):
    """Batches of token numbers, shifted by one for the targets."""
    source = random.Random(seed)
    while True:
        rows = []
        for _ in range(size):
            text = ""
            while len(text) <= length:
                a, b = source.randrange(100), source.randrange(100)
                text += f"{a}+{b}={a + b};"
            rows.append([LETTERS.index(letter) for letter in text[: length + 1]])
        tokens = torch.tensor(rows, device=device)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def main():
    """Train, and print one JSON line every 50 steps and one at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="under torch.compile, for comparison")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    model = Gpt(layers=arguments.layers, length=arguments.length).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    run = torch.compile(model) if arguments.compile else model
    began, losses = time.perf_counter(), []
    for step, (tokens, targets) in zip(
        range(arguments.steps), batches(arguments.batch, arguments.length, arguments.seed, device), strict=False
    ):
        loss = run(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == min(20, arguments.steps // 2):
            # The first steps compile kernels.
            losses[-1].item()
            began, first = time.perf_counter(), step + 1
        if step % 50 == 49:
            print(json.dumps({"step": step + 1, "loss": round(losses[-1].item(), 4)}), flush=True)
    last = losses[-1].item()
    seconds = time.perf_counter() - began
    tokens_per_second = (arguments.steps - first) * arguments.batch * arguments.length / max(seconds, 1e-9)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
    print(json.dumps({"loss": round(last, 4), "tokens per second": round(tokens_per_second), "peak MiB": peak}))


if __name__ == "__main__":
    main()
