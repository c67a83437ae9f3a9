"""Language models as planner and coder, through any endpoint of the OpenAI chat-completions protocol."""
