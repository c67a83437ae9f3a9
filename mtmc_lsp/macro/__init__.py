"""The action catalogue, what is legal in a state, and the planners. Pure Python, no torch."""
