"""A small GPT (about 30 M parameters) that learns generated text; its blocks and loss can get kernels.

    mtmc optimize examples/train_gpt.py --all --apply    # kernels for both passes of the marked functions and modules
    python examples/train_gpt.py --steps 300             # the loss, tokens per second and peak memory as JSON lines
    python scripts/compare_gpt.py --out gpt.jsonl        # with and without kernels and torch.compile, three seeds, as a table

The text is arithmetic (``17+25=42;``), so that the loss shows whether the model learns.
"""

import argparse
import itertools
import json
import random
import time

import torch
import torch.nn.functional as F
from torch import nn

LETTERS = "0123456789+=;"
SIZES = {"vocabulary": 8192, "width": 512, "heads": 8, "layers": 8, "inner": 1408}
TINY = {"vocabulary": 32, "width": 512, "heads": 8, "layers": 1, "inner": 96}


# mtmc: x=bf16[N,D] weight=bf16[D] N=65536 D=512 grad=x,weight
def rms_norm(x, weight, eps=1e-6):
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return hidden.to(x.dtype) * weight


# mtmc: gate=bf16[N,I] up=bf16[N,I] N=65536 I=1408 grad=gate,up
def gated(gate, up):
    return F.silu(gate) * up


# mtmc: x=bf16[B,H,S,64] cos=bf16[S,64] sin=bf16[S,64] B=256 H=8 S=256 grad=x
def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


# mtmc: x=bf16[N,D] weight=bf16[V,D]@-0.05..0.05 target=i64[N]@0..V-1 N=65536 D=512 V=8192 grad=x,weight
def token_loss(x, weight, target):
    return F.cross_entropy((x @ weight.T).float(), target)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.Parameter(torch.ones(width))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    # mtmc: x=bf16[B,S,512] cos=bf16[S,64] sin=bf16[S,64] B=256 S=256 grad=x
    # mtmc: init: width=512 heads=8
    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        normed = rms_norm(x.view(-1, width), self.norm).view_as(x)
        split = self.qkv(normed).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2).contiguous() for part in split.unbind(2))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm = nn.Parameter(torch.ones(width))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    # mtmc: x=bf16[B,S,512] cos=bf16[S,64] sin=bf16[S,64] B=256 S=256 grad=x
    # mtmc: init: width=512 heads=8 inner=1408
    def forward(self, x, cos, sin):
        x = self.attention(x, cos, sin)
        rows = rms_norm(x.view(-1, x.shape[-1]), self.norm)
        return x + self.down(gated(self.gate(rows), self.up(rows))).view_as(x)


class Gpt(nn.Module):
    def __init__(self, vocabulary, width, heads, layers, inner, length):
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
        return token_loss(rms_norm(x.view(-1, x.shape[-1]), self.norm), self.head.weight, targets.reshape(-1))


def batches(size, length, seed):
    """Batches of token numbers, one token longer than the input."""
    source = random.Random(seed)
    numbers = torch.zeros(128, dtype=torch.long)
    numbers[[ord(letter) for letter in LETTERS]] = torch.arange(len(LETTERS))
    needed = size * (length + 1)
    while True:
        # The shortest text has six letters.
        count = needed // 6 + 1
        pairs = zip(source.choices(range(100), k=count), source.choices(range(100), k=count), strict=True)
        text = "".join(f"{a}+{b}={a + b};" for a, b in pairs)[:needed]
        yield numbers[torch.tensor(list(text.encode()))].view(size, length + 1)


def train(seed, steps, batch, length, sizes, compiled=False):
    """Train a new model; the losses of all steps, tokens per second and peak memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The text is ready before the clock starts.
    text = [rows.to(device) for rows in itertools.islice(batches(batch, length, seed), steps)]
    torch.manual_seed(seed)
    model = Gpt(**sizes, length=length).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    run = torch.compile(model) if compiled else model
    losses = []
    # The first steps compile kernels.
    warm = min(20, steps // 2)
    for step, rows in enumerate(text):
        if step == warm:
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
        loss = run(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses).tolist()
    rate = (steps - warm) * batch * length / (time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
    return {"seed": seed, "losses": losses, "tokens per second": rate, "peak MiB": peak}


def main():
    """Train, and print one JSON line a seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tiny", action="store_true", help="a model for CPUs")
    parser.add_argument("--compile", action="store_true", help="under torch.compile, for comparison")
    options = parser.parse_args()
    for seed in options.seeds:
        sizes = TINY if options.tiny else SIZES
        result = train(seed, options.steps, options.batch, options.length, sizes, options.compile)
        result["losses"] = [round(loss, 4) for loss in result["losses"][:: max(1, options.steps // 10)]]
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
