"""Edits of how kernels are launched."""
