"""The file of kernels beside an open file: its text, and edits of both files."""
