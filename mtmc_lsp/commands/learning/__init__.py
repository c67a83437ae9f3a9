"""Commands for learned planners: what they learn from, and how they are trained."""
