"""Measure speed and memory of the loss over a vocabulary beside its peers: `python -m benchmarks.loss`."""
