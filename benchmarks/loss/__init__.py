"""Speed and memory of the loss over a vocabulary, against the peers in the same run: `python -m benchmarks.loss`."""
