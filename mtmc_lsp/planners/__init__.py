"""Planners that need no language model: they choose the next macro action."""
