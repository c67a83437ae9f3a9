"""Elementwise, reduction and scan kernels over a tile of rows and columns."""
