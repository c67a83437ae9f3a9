"""Configurations of kernels with reductions over several sets of axes."""
