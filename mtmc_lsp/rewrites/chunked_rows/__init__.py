"""Rewrites that make loops over chunks of rows possible."""
