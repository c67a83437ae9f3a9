"""The action catalogue: one module per family of macro actions.

Each holds the rule of when an action is legal (with the reason why it then changes no result), what it does to the schedule,
and which actions it proposes in a situation, each with its one-line text, a sentence for people, and the time it should save.
"""
