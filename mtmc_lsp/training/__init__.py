"""Training of policies on measured transitions."""
