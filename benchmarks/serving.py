"""Measure `serve` under many clients at once: latency, speed, memory, and whether the translations are `translate`'s.

    python -m benchmarks.serving RUN                    # the validation sentences of the run's data
    python -m benchmarks.serving RUN --clients 200

For each engine that the run has, the service starts in a process of its own. All clients send one sentence at the same
moment; then one client sends as many, one after another. All traffic stays on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import httpx
import torch

from benchmarks.loss.results import hardware
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.export import ctranslate2_engine
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.translating.translate import translate
from seqpar.testing.markdown_table import markdown_table

HEAD = ["engine", "clients", "answered", "equal to translate", "median s", "p95 s", "requests/s", "peak MB"]


def main() -> None:
    """Measure a run, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a run of the recipe")
    parser.add_argument("--clients", type=int, default=200, help="requests at the same time (default: 200)")
    options = parser.parse_args()
    translator = load_translator(options.run / "best")
    config = translator.config
    pairs = load_pairs(config.data, "valid", config.subwords.lowercase)
    sentences = [pair.source for pair in pairs[: options.clients]]
    expected = {"torch": translate(translator, sentences, config.decoding)}
    exported = options.run / "ctranslate2"
    if exported.exists():
        engine = ctranslate2_engine.load(exported)
        expected["ctranslate2"] = ctranslate2_engine.translate(engine, sentences, config.decoding)
    languages = {"source": config.data.source, "target": config.data.target}
    bodies = [{"q": sentence, **languages} for sentence in sentences]
    rows = []
    for name, translations in expected.items():
        rows += measured(options.run, name, bodies, translations)
    print(markdown_table(HEAD, rows))
    print(
        f"\n{date.today()}, {hardware('cpu')}, {torch.get_num_threads()} threads; torch {torch.__version__}; "
        f"{len(sentences):,} validation sentences, beam {config.decoding.beam}"
    )


def measured(run: Path, engine: str, bodies: Sequence[dict[str, str]], expected: Sequence[str]) -> list[list[str]]:
    """Return the rows of one engine."""
    words = ["serve", str(run), "--engine", engine, "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes.translation", *words], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert process.stdout is not None
        url = next(found[0] for line in process.stdout if (found := re.search(r"http://[^ ]+:\d+", line)))
        rows = []
        for clients in (len(bodies), 1):
            start = time.perf_counter()
            answers = asyncio.run(asked(url, bodies, clients))
            taken = time.perf_counter() - start
            rows.append([engine, f"{clients:,}", *figures(answers, expected, taken), f"{peak_mb(process.pid):.0f}"])
        return rows
    finally:
        process.terminate()
        process.wait()


async def asked(url: str, bodies: Sequence[dict[str, str]], clients: int) -> list[tuple[int, str, float]]:
    """Send every request, `clients` at a time; return each one's status, translation and seconds."""
    turn = asyncio.Semaphore(clients)

    async def one(client: httpx.AsyncClient, body: dict[str, str]) -> tuple[int, str, float]:
        async with turn:
            start = time.perf_counter()
            answer = await client.post("/translate", json=body)
            return answer.status_code, answer.json().get("translatedText", ""), time.perf_counter() - start

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        return await asyncio.gather(*[one(client, body) for body in bodies])


def figures(answers: Sequence[tuple[int, str, float]], expected: Sequence[str], taken: float) -> list[str]:
    """Return how many were answered and equal, the median and the 95th percentile of the seconds, and the speed."""
    seconds = sorted(one for _, _, one in answers)
    equal = sum(text == other for (_, text, _), other in zip(answers, expected, strict=True))
    return [
        f"{sum(status == 200 for status, _, _ in answers):,}",
        f"{equal:,}",
        f"{seconds[len(seconds) // 2]:.2f}",
        f"{seconds[int(len(seconds) * 0.95)]:.2f}",
        f"{len(answers) / taken:.0f}",
    ]


def peak_mb(process: int) -> float:
    """Return the most memory that a process has had, from Linux's /proc."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1000


if __name__ == "__main__":
    main()
