"""The text of loops: statements in the forms that the rewriting knows."""
