"""Measurement of a candidate: compile, verify and time it in worker processes."""
