"""Policies and the measured transitions that they learn from."""
