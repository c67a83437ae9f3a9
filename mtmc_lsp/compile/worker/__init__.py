"""Compilation in the user's interpreter."""
