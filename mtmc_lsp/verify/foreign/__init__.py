"""What only foreign candidates are checked for."""
