"""Matrix-product kernels, convolutions as implicit GEMM included."""
