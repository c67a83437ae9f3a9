"""Speeds up torch's export and decomposition of large graphs."""
