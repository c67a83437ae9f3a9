"""Code that runs in the user's interpreter."""
