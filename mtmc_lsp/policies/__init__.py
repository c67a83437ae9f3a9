"""Policies: they weigh the legal actions of a state and STOP. A planner turns a policy's best choice into the next step."""
