"""The kernel IR: ATen operations as primitives, loop axes, regions and what holds of them. Pure Python, no torch."""
