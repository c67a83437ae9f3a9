"""Observation of kernels under Triton's interpreter. Runs in workers."""
