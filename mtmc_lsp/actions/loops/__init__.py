"""Actions on loops over time steps."""
