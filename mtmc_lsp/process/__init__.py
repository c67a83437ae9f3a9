"""Worker processes: start, fork server, sandbox, priority, GPU lock."""
