"""Autocast of a GPU: the state of a call, and the same casts for CPU tensors that stand in for those of a GPU."""
