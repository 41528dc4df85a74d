"""The loss inside other people's trainers, one file for each; a file imports its package, and nothing imports the file.

| file | what |
|---|---|
| `transformers` | Hugging Face models and their Trainer: `apply_seqpar_loss`, `compute_loss_func` |
| `transformers_model` | what such a model does with labels, hidden states and logits, by its own word |
| `transformers_check` | whether it does: its own logits and loss of a few made-up tokens |
| `lightning` | `accumulated_step` for manual optimisation |
| `accelerate` | `accumulated_step` for a loop of one's own |
| `fairseq` | a criterion for fairseq's trainer |
| `opennmt` | a `LossCompute` for OpenNMT-py 3 and Eole |
"""
