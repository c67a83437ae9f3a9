"""Candidate repairs of kernels: small edits that keep names, comments and layout. Verification decides which one is right."""
