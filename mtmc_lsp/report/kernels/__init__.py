"""Text about Triton kernels that are already in a file."""
