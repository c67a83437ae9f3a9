"""Verification, timing, compile reports; the in_worker parts run under the user's interpreter."""
