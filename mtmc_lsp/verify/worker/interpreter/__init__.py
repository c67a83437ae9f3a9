"""Changes to Triton's interpreter: missing features, speed, and source text that it can run."""
