"""Parts that every kernel writer shares: expressions, index arithmetic, parameters, device functions."""
