"""Generated code with a backward pass."""
