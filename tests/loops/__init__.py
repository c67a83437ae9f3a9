"""Loops over time steps: captured as one node, and run as one kernel."""
