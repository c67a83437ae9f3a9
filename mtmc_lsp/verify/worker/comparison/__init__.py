"""Comparison of results with the reference and the float64 oracle."""
