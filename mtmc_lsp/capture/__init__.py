"""Captures a target: finds its workload and turns it into a graph. ``worker`` runs under the user's interpreter."""
