"""Tree-sitter: find targets, read workload directives, build text edits. Imports only core; no torch."""
