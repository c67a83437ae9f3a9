"""Verification in the user's interpreter: inputs, oracle, comparison."""
