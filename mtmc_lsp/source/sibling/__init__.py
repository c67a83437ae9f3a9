"""Generated code in a file of its own, ``NAME_kernels.py`` beside the user's ``NAME.py``."""
