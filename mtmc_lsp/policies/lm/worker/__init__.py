"""Scoring of action texts by a language model, in worker processes."""
