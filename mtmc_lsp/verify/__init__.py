"""Verification: does a candidate compute what the user's code computes?"""
