"""Matmul kernels, including convolutions as implicit GEMM."""
