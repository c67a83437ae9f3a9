"""The files of a training's folder."""

TREES = "trees.jsonl"
"""The data as texts."""
CURVES = "curves.jsonl"
"""One point per update."""
PAGE = "curves.html"
POLICY = "policy"
"""The folder of the trained policy."""
