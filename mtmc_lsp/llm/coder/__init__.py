"""The coder that asks a language model for one step's edit."""
