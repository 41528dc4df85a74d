"""Use the loss in other projects' trainers. Each file needs its project's package; `import seqpar` loads none of them.

| file | purpose |
|---|---|
| `transformers` | Hugging Face models and their Trainer: `apply_seqpar_loss`, `SeqparLoss`, `compute_loss_func` |
| `transformers_loss` | the hooks that give a model the loss |
| `transformers_trainer` | find the Trainer that runs a model, and correct what it read from the model |
| `transformers_copies` | leave the loss out of copies and pickles of a model |
| `transformers_head` | get from the output embeddings what the loss needs, whether or not they are sharded |
| `transformers_model` | read from a model and its configuration what it does with labels, hidden states and logits |
| `transformers_check` | compare that, once for each setting, with the model's own logits and loss of a few tokens |
| `transformers_window` | make up the labels of those few tokens |
| `transformers_call` | the state of one training forward |
| `peft_adapters` | read what PEFT has put on a model's output embeddings |
| `trl` | TRL's trainers: `apply_seqpar_scores`, `SeqparScores`, `allow_head_adapter` |
| `trl_distillation` | the divergence of TRL's DistillationTrainer |
| `trl_head` | read the output embeddings and PEFT's adapters on them, and check them against the model's own logits |
| `trl_node` | the function of log-probabilities in place of TRL's, and a check of TRL's version |
| `accumulate` | `accumulate_step` for loops on Accelerate, Lightning Fabric and Lightning's Trainer |
| `axolotl` | axolotl's plugin `SeqparPlugin` |
| `ms_swift` | the loss type `seqpar` of ms-swift |
| `nemo_automodel` | `SeqparCrossEntropy` for NeMo AutoModel's recipes |
| `prime_rl` | scores in prime-rl's output heads |
| `torchtitan` | `SeqparCrossEntropy` for torchtitan's trainer |
| `xtuner` | `SeqparCrossEntropyConfig` for xtuner's v1 engine |
| `say_once` | the line in their logs |
| `made_up` | make up the logits of a few tokens, and run a model on them without a trace |
| `opennmt` | the trainers of OpenNMT-py 3 and Eole: `apply_seqpar_loss` |
"""
