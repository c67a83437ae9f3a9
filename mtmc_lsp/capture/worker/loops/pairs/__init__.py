"""Complex values of kept loops as pairs of real values."""
