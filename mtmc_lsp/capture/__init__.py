"""Workload to example inputs, graph and eager facts; the in_worker part runs under the user's interpreter."""
