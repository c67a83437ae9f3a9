"""Explains why a generated guard refuses a call."""
