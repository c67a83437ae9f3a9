"""Timing on a GPU: devices, clocks, cached times."""
