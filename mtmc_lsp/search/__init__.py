"""Drives macro, micro and measure; stores every step."""
