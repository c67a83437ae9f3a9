"""Generated code in a separate file, ``NAME_kernels.py`` beside the user's ``NAME.py``."""
