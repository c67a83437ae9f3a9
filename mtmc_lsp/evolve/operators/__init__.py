"""Operators make a new version from an old one: by actions of the catalogue, or by a language model with tools."""
