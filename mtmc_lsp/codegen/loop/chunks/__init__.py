"""Loops over time steps as matrix products of chunks of iterations."""
