"""Planners without a language model: they choose the next macro action."""
