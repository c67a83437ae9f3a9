"""The built-in coder: graph and schedule to readable Triton source. Pure Python, no torch, no network."""
