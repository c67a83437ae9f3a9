"""Runs of the user's code in float64, exact or with rounding errors."""
