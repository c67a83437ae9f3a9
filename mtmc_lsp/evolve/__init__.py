"""Long searches that evolve versions: operators, fitness over several workloads, an archive, a supervisor, and the lineage."""
