"""Commands for Triton kernels that are already in a file."""
