"""Building blocks of all kernel writers: expressions, index arithmetic, parameters, device functions."""
