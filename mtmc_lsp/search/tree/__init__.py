"""Searches that keep several versions: a beam, and Monte Carlo tree search."""
