"""The schedule: which nodes form which kernel, and the configuration of each kernel."""
