"""`python -m recipes.translation <command>`."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # Ahead of the working directory, which may contain a package `models` of its own
    sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes.translation.errors import missing_package
from recipes.translation.processes.beginning import end_at_interrupt, end_with_launcher

try:
    if __name__ == "__main__":
        end_at_interrupt()
        end_with_launcher()
    from recipes.translation.commands import main
except ModuleNotFoundError as error:
    if missing := missing_package(error):
        print(f"error: {missing}\n", end="", file=sys.stderr)  # not `fail`, which may need the missing package itself
        sys.exit(2)
    raise

if __name__ == "__main__":
    # Torch's CPU threads wait for each other by spinning. If other processes want the cores too, a spinning thread
    # keeps the one that it waits for from running: measured 3 to 15 times slower on two busy cores. The variable is
    # read when torch is imported, which every command does later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun's final report then has the first failure's traceback
        from torch.distributed.elastic.multiprocessing.errors import record

        sys.exit(record(main)(sys.argv[1:]))
    sys.exit(main(sys.argv[1:]))
