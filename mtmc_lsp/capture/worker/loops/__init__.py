"""Loops over time steps that a capture keeps as one node instead of unrolling them. Runs in workers."""
