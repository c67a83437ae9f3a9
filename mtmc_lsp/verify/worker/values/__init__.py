"""Distributions of values that are telling for some kind of operation."""
