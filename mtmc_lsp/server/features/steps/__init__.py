"""Review of steps: their lenses, the commands that keep and remove them, and their state for clients."""
