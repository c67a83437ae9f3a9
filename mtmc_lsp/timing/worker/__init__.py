"""Timing in the user's interpreter."""
