"""Cross-compilation of kernels and the report of registers, spills and shared memory."""
