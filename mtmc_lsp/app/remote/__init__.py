"""Stages of a pipeline on the workers of a cluster: captures, compilations, verifications and timings."""
