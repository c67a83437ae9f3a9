"""Dispatch statements that are more than a statement at the start of a body."""
