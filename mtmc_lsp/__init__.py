"""mtmc-lsp: turn PyTorch functions into verified, measured Triton kernels, step by step, in the editor."""

__version__ = "0.1.0"
