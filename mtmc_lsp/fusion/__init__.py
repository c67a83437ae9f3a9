"""The search for nodes that become one kernel."""
