"""The page: sections of HTML around charts. Whatever comes from data is escaped, and has its own direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from recipes.translation.report.charts import SERIES, STYLES
from recipes.translation.report.figures import Chart

TEMPLATE = Path(__file__).with_name("page.html")
LONGEST = 600
"""Characters of a sentence, or of a setting, that are shown."""


def page(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """Return the whole page; title and subtitle are text, sections are HTML."""
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), subtitle=escape(subtitle), body="\n".join(sections))


def section(title: str, *parts: str) -> str:
    """Return a section; its parts are HTML."""
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(part for part in parts if part) + "\n</section>"


def note(text: str) -> str:
    """Return a remark."""
    return f'<p class="soft">{escape(text)}</p>'


def text_of(text: str) -> str:
    """Return text from data as an element that keeps its own direction: nothing in it is markup."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} ... ({len(text):,} characters)"
    if not text.strip():
        return '<span class="soft">(empty)</span>'
    return f'<span class="text" dir="auto">{escape(text)}</span>'


def tiles(numbers: Sequence[tuple[str, str, str]]) -> str:
    """Return a row of numbers, each with its name and a remark."""
    each = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for name, value, remark in numbers
    )
    return f'<dl class="tiles">{each}</dl>'


def charts(found: Iterable[Chart]) -> str:
    """Return charts side by side, as many as fit, and then why others are missing."""
    drawn, missing = [], []
    for chart in found:
        if chart.svg:
            drawn.append(_figure(chart))
        else:
            missing.append(note(f"{chart.title}: {chart.caption}"))
    return '<div class="grid">' + "\n".join(drawn) + "</div>" + "\n".join(missing)


def attention_map(chart: Chart, pairs: Mapping[str, str]) -> str:
    """Return an attention map, which scrolls where it is wider than the page, under its sentences."""
    heading = f"<h3>{escape(chart.title)}</h3>{listed(pairs.items())}"
    return f'<div class="card maps">{heading}<div class="scroll">{chart.svg}</div></div>'


def listed(pairs: Iterable[tuple[str, str]]) -> str:
    """Return names with texts from data; a name may occur twice."""
    each = "".join(f"<dt>{escape(name)}</dt><dd>{text_of(text)}</dd>" for name, text in pairs)
    return f'<dl class="pairs">{each}</dl>'


def cards(parts: Iterable[str]) -> str:
    """Return pieces of HTML, each in a frame."""
    return "\n".join(f'<div class="card">{part}</div>' for part in parts)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """Return a table of texts; with `numbers`, all columns but the first are aligned as numbers."""
    kind = ""
    if numbers:
        kind = ' class="number"'
    head = "<th></th>" + "".join(f"<th{kind}>{text_of(text)}</th>" for text in heads[1:])
    if heads[0]:
        head = head.replace("<th></th>", f"<th>{text_of(heads[0])}</th>", 1)
    body = "".join(
        f"<tr><td>{text_of(row[0])}</td>" + "".join(f"<td{kind}>{text_of(text)}</td>" for text in row[1:]) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(title: str, inner: str) -> str:
    """Return HTML that opens on demand."""
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def key(names: Sequence[str]) -> str:
    """Return the key to the lines of several runs."""
    return "<p>" + "".join(_key_of(number, name) for number, name in enumerate(names)) + "</p>"


def _key_of(number: int, name: str) -> str:
    style = STYLES[number % len(STYLES)]
    dashes = ""
    if not isinstance(style, str):
        dashes = f' stroke-dasharray="{" ".join(f"{1.7 * length:g}" for length in style[1])}"'
    line = (
        '<svg width="30" height="8" viewBox="0 0 30 8" aria-hidden="true"><path d="M0 4H30" '
        f'style="stroke: var(--series-{number % len(SERIES)})" stroke-width="2"{dashes}/></svg>'
    )
    return f'<span class="key">{line}{text_of(name)}</span>'


def _figure(chart: Chart) -> str:
    caption = f"<figcaption>{escape(chart.caption)}</figcaption>"
    return f"<figure><h3>{escape(chart.title)}</h3>{chart.svg}{caption}</figure>"
