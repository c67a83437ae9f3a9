"""Text, HTML and pictures of a run."""
