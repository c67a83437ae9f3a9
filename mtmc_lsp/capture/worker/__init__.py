"""Capture under the user's interpreter: load the file, run the target, export its graph."""
