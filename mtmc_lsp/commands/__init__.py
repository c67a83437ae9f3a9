"""Commands of ``mtmc``, a module each; ``cli.py`` registers them."""
