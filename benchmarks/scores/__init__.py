"""Measure log-probabilities and entropies of tokens, forward and backward, beside other ways: `-m benchmarks.scores`."""
