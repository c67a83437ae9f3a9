"""Workloads in the source: directives, annotations, signatures."""
