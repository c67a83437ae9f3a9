"""The built-in coder: graph + schedule to readable Triton, with no network."""
