"""Use cases that the command line and the language server share: optimise, bench, profile, record, export, doctor."""
