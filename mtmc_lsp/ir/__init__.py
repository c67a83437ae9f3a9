"""The kernel IR: ATen operations as primitives, loop axes, regions, and analyses of them. Pure Python, no torch."""
