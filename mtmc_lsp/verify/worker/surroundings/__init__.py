"""Other surroundings in which a candidate must give the same results: another time, or a user's program. Runs in workers."""
