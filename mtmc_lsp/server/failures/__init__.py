"""Failed jobs: what each client shows of them, and where."""
