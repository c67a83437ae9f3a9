"""First steps of whole networks, which change all of their operations at once."""
