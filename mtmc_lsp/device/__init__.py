"""Device models: one data file per GPU, calibration on the user's machine, and the choice of a model for a plan."""
