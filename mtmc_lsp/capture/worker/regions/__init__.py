"""Regions in the worker: the region as a function, and the values of its inputs."""
