"""Complete runs of several planners on the same problems, at equal conditions."""
