"""What is observed of a candidate's calls besides their results. Runs in workers."""
