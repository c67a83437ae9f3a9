"""Training of the ``lm`` policy: a supervised start on the best paths, then PPO with the offline tree as environment."""
