"""Tensor descriptors in place of block pointers."""
