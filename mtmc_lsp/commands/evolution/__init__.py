"""Commands for long searches: ``mtmc evolve``, ``mtmc lineage`` and ``mtmc knowledge``."""
