"""Rewrites of a whole graph, which have no single node."""
