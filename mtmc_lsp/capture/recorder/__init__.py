"""The call recorder that ``mtmc record`` loads into the user's program. Standard library only."""
