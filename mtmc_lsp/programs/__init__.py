"""Programs that policies learn from: a generator, a corpus of installed packages, splits by family and a test for leaks."""
