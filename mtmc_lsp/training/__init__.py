"""Training of policies on measured trees of transitions, and their evaluation without a GPU."""
