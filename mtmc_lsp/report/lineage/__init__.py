"""The lineage of an evolution as text, as a page and as a git repository."""
