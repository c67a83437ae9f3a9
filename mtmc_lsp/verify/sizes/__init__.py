"""Sizes of verification cases, and the limits of Triton's interpreter."""
