"""What can be done with a run that has been trained: the commands, as they can be pasted."""

from __future__ import annotations

from recipes.translation.data.corpora import Corpora
from recipes.translation.settings.config import RunConfig
from recipes.translation.training.summary import command

PURPOSES = {
    "translate": "type sentences, or add --file FILE",
    "evaluate": "scores with confidence intervals",
    "report": "a page with curves, scores and translations",
    "serve": "a page that translates, and an endpoint for programs",
}


def next_steps(config: RunConfig) -> str:
    """Return a line for each command to go on with."""
    lines = []
    for name, purpose in PURPOSES.items():
        words = [name, "--run", config.run]
        if name == "evaluate" and not Corpora(config).has("test"):
            words += ["--split", "valid"]
        lines.append(f"  {command(*words)}  # {purpose}")
    return "\n".join(["[train] next:", *lines])
