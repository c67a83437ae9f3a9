"""Autotuners, and the values that they may choose."""
