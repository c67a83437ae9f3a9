"""Conditions of guards."""
