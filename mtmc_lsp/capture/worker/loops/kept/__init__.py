"""One execution of a loop that is kept, and the trace of its body."""
