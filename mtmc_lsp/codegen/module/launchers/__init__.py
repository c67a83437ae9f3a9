"""The launcher: its values and memory, its statements, and the operator around it."""
