"""Cross-compiles kernels and reports registers, spills and shared memory."""
