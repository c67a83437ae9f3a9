"""Fusion of the code around launches into kernels."""
