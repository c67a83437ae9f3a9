"""Jobs on the workers of a Dask cluster. Only files here import ``distributed``, and only when a cluster is used."""
