"""Kernels of loops over time steps."""
