"""Products as practitioners run them: gate and up, queries, keys and values, gated units, weights of 8 and 4 bits."""

import torch
import torch.nn as nn
import torch.nn.functional as F


# mtmc: x=bf16[B,4096] gate=bf16[11008,4096] up=bf16[11008,4096] B=16
def gate_and_up_of_16_rows(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


# mtmc: x=bf16[B,4096] gate=bf16[11008,4096] up=bf16[11008,4096] B=2048
def gate_and_up_of_2048_rows(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


# mtmc: x=bf16[B,T,1024] q=bf16[1024,1024] k=bf16[1024,1024] v=bf16[1024,1024] B=8 T=128
def queries_keys_values(x, q, k, v):
    heads = (F.linear(x, weight).unflatten(-1, (16, 64)).transpose(1, 2) for weight in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True)


# mtmc: x=f16[4,1024,640] init: width=640 inner=2560
class GEGLU(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.proj = nn.Linear(width, 2 * inner)
        self.half()

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


# mtmc: x=bf16[B,4096] weight=i8[4096,4096]@-127..127 scale=bf16[4096]@0.001..0.01 B=1
def int8_of_1_row(x, weight, scale):
    return x @ (weight.to(x.dtype) * scale[:, None]).T


# mtmc: x=bf16[B,4096] weight=i8[4096,4096]@-127..127 scale=bf16[4096]@0.001..0.01 B=16
def int8_of_16_rows(x, weight, scale):
    return x @ (weight.to(x.dtype) * scale[:, None]).T


# mtmc: x=bf16[B,4096] weight=i8[4096,4096]@-127..127 scale=bf16[4096]@0.001..0.01 B=64
def int8_of_64_rows(x, weight, scale):
    return x @ (weight.to(x.dtype) * scale[:, None]).T


# mtmc: x=f16[B,4096] weight=u8[4096,2048]@0..255 scale=f16[4096,32]@0.001..0.01 zero=f16[4096,32]@0..15 B=1
def int4_of_1_row(x, weight, scale, zero):
    q = torch.stack([weight & 0xF, weight >> 4], dim=-1).reshape(4096, 32, 128).to(x.dtype)
    return F.linear(x, ((q - zero[:, :, None]) * scale[:, :, None]).reshape(4096, 4096))


# mtmc: x=f16[B,4096] weight=u8[4096,2048]@0..255 scale=f16[4096,32]@0.001..0.01 zero=f16[4096,32]@0..15 B=16
def int4_of_16_rows(x, weight, scale, zero):
    q = torch.stack([weight & 0xF, weight >> 4], dim=-1).reshape(4096, 32, 128).to(x.dtype)
    return F.linear(x, ((q - zero[:, :, None]) * scale[:, :, None]).reshape(4096, 4096))


# mtmc: x=f16[B,4096] weight=u8[4096,2048]@0..255 scale=f16[4096,32]@0.001..0.01 zero=f16[4096,32]@0..15 B=64
def int4_of_64_rows(x, weight, scale, zero):
    q = torch.stack([weight & 0xF, weight >> 4], dim=-1).reshape(4096, 32, 128).to(x.dtype)
    return F.linear(x, ((q - zero[:, :, None]) * scale[:, :, None]).reshape(4096, 4096))


# mtmc: x=f16[B,4096] weight=i32[512,4096] scale=f16[32,4096]@0.001..0.01 zero=f16[32,4096]@0..15 B=16
def gptq_of_16_rows(x, weight, scale, zero):
    shifts = torch.arange(0, 32, 4, device=x.device, dtype=torch.int32)
    q = ((weight[:, None, :] >> shifts[None, :, None]) & 0xF).reshape(4096, 4096)
    group = torch.arange(4096, device=x.device) // 128
    return x @ ((q.to(x.dtype) - zero[group]) * scale[group])


# mtmc: x=f32[B,128] y=f32[B,128] init: first=128 second=128 width=32 B=512
class Bilinear(nn.Module):
    def __init__(self, first, second, width):
        super().__init__()
        self.form = nn.Bilinear(first, second, width)

    def forward(self, x, y):
        return torch.relu(self.form(x, y))
