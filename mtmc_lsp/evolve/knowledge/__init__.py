"""What is known about fast kernels: notes that ship with the package, and lessons of earlier runs on this machine."""
