"""Reductions over several sets of axes in one kernel."""
