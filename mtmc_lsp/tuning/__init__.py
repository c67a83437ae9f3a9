"""The cost model: predicted time of kernels, launches and whole schedules."""
