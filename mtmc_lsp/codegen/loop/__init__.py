"""Code of loops over time steps: kernels, and loops of torch calls."""
