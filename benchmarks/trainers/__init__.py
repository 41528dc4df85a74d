"""Measure the memory of a training step in other people's trainers: `python -m benchmarks.trainers`."""
