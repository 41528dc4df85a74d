"""Run the lines that a finding shows."""

import torch


def run(reproduction: str) -> None:
    """Run them; beside a GPU their first line puts new tensors there, and would do so for all that follows."""
    try:
        exec(reproduction, {})
    finally:
        torch.set_default_device(None)
