"""Wrong, probing, faking and honest candidates for ``mtmc verify``, and what it answers to each."""
