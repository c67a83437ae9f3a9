"""Requests to an OpenAI-compatible endpoint: budget, ledger, retries, stored answers."""
