"""The commands of ``mtmc``, one module each; ``app.py`` registers them."""
