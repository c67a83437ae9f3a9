"""Targets that can be captured in regions only."""
