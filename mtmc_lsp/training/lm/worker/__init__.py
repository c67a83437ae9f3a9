"""The trainer of the ``lm`` policy, in a worker process."""
