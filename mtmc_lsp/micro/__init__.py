"""The coders: one macro action in, one new candidate out. Pure Python, no torch."""
