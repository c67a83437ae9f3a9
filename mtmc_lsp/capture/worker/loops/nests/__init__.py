"""Nests of two long loops over a table as one loop over time steps."""
