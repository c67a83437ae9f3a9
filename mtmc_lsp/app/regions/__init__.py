"""Targets of which only regions can be captured."""
