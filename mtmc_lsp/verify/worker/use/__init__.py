"""Uses the reference and the candidate as a user's program does, step by step. Runs in workers."""
