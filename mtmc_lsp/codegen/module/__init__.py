"""Everything around the kernels: launcher, guard, constants, torch calls, names."""
