"""Module code around the kernels: launcher, guard, constants, torch calls and names."""
