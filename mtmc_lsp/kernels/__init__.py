"""Triton kernels that are already in the user's file: reading them, observing their memory accesses, repairing them."""
