"""``mtmc bench``: a suite of problems, their results and the summary."""
