"""The coder that asks a language model, through any endpoint that speaks OpenAI's chat completions."""
