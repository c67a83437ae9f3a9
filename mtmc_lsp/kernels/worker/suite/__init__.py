"""Tests of a suite of PyTorch functions."""
