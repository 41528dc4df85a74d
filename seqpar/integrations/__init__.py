"""Use the loss in other projects' trainers. Each file needs its project's package; `import seqpar` loads none of them.

| file | purpose |
|---|---|
| `transformers` | Hugging Face models and their Trainer: `apply_seqpar_loss`, `compute_loss_func` |
| `transformers_model` | read from a model and its configuration what it does with labels, hidden states and logits |
| `transformers_check` | compare that with the model's own logits and loss of a few made-up tokens |
| `transformers_call` | the state of one training forward |
| `lightning` | `accumulated_step` for manual optimisation |
| `accelerate` | `accumulated_step` for your own training loop |
| `fairseq` | a criterion for fairseq's trainer |
| `opennmt` | a `LossCompute` for OpenNMT-py 3 and Eole |
"""
