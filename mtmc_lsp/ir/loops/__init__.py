"""Loops over time steps as generated kernels."""
