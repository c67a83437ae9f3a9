"""Device models: one data file per GPU, the user's own measurements, and which of them a plan uses."""
