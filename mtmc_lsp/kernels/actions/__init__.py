"""Optimisations of Triton kernels that are already in a file, as edits that keep the author's style."""
