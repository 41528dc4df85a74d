"""Measure log-probabilities and entropies of tokens beside other ways: `python -m benchmarks.scores`."""
