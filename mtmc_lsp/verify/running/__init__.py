"""How the cases of a candidate run: calls, processes, smaller failing cases, and the verdict."""
