"""Uses of a target besides the plain call: hooks, modes, state dicts, copies, other constructor arguments."""
