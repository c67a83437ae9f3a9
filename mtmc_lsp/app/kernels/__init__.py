"""Use cases of Triton kernels that are already in a file."""
