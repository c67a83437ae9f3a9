"""``mtmc explore``: grows a tree of versions for each program of a suite, and stores the transitions that policies learn from."""
