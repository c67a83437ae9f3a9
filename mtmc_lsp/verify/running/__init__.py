"""In which processes the cases of a candidate run."""
