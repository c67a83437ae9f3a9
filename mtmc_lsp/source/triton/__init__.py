"""Triton kernels in the user's file: launch sites, launch values, a glossary."""
