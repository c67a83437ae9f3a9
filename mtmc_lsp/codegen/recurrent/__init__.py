"""Kernels of recurrent layers."""
