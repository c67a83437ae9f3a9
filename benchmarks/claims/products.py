"""Plain products, beside cuBLAS. What is not faster is left to the library, and its ratio is told."""

import torch


# mtmc: a=bf16[4096,4096] b=bf16[4096,4096]
def bf16_4096(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


# mtmc: a=bf16[8192,8192] b=bf16[8192,8192]
def bf16_8192(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


# mtmc: a=f32[2048,2048] b=f32[2048,2048]
def fp32_2048(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


# mtmc: a=f32[4096,4096] b=f32[4096,4096]
def fp32_4096(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


# mtmc: a=f32[8192,8192] b=f32[8192,8192]
def fp32_8192(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b
