"""Coder that asks a language model for the edit of one step."""
