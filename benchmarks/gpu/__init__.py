"""Everything that only a GPU can show, in parts of under nine minutes each: `python -m benchmarks.gpu`."""
