"""Plan a training before it runs: the seconds of a step in each layout, from a measured rate and known links.

    python -m planning --parameters 8.03e9 --layers 32 --d 4096 --vocab 128256 --length 8192 --local-batch 2 \\
        --flops-per-second 335e12 --devices 4096

`planning.step_plan` has the plan and its equations, `planning.links` the collectives. `seqpar.memory_plan` says what a
device's memory must hold.
"""
