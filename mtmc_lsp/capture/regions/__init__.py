"""Regions: runs of statements of a target that are optimised in place if the whole target cannot be captured."""
