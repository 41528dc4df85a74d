"""Count the lines of code that guard, in `seqpar/` without `testing/`, and print their share wing by wing.

A line guards if it belongs to

- a `raise`, with its message;
- an `if`, a loop, a `with` or a `try` that contains nothing but guards and the making of their messages, with its head;
- a function or method whose name begins with check or refuse, with or without an underscore;
- a private function that returns text and that only guards of its file call: a part of their messages.

Blank lines, comments and docstrings are no lines of code. `python -m tests.guarding_lines [ROOT]` prints the table.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

GUARD_NAME = re.compile(r"_?(check|checked|refuse)(_|$)")
"""Not `_checksum`."""

BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)
MESSAGE_PARTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Assert, ast.Pass)
"""What a block that leads only to a raise may contain besides."""

NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


class Lines(NamedTuple):
    """How many lines of code, and how many of them guard."""

    code: int
    guarding: int

    @property
    def share(self) -> float:
        return self.guarding / max(1, self.code)


def count(source: str) -> Lines:
    """Return the lines of one file."""
    tree = ast.parse(source)
    code = _code_lines(source, tree)
    return Lines(len(code), len(code & _guarding_lines(tree)))


def count_package(package: Path) -> dict[str, Lines]:
    """Return the lines of each wing outside `testing/`; a file that is in no folder is a wing of its own."""
    wings: dict[str, Lines] = defaultdict(lambda: Lines(0, 0))
    for path in sorted(package.rglob("*.py")):
        wing = path.relative_to(package).parts[0]
        if wing == "testing":
            continue
        found = count(path.read_text())
        wings[wing] = Lines(wings[wing].code + found.code, wings[wing].guarding + found.guarding)
    return dict(wings)


def total(wings: dict[str, Lines]) -> Lines:
    """Return the lines of all wings."""
    return Lines(sum(lines.code for lines in wings.values()), sum(lines.guarding for lines in wings.values()))


def _code_lines(source: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that are neither blank nor a comment nor part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        # A text that stands alone documents the module, the function or the constant above it
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= _lines_of(node)
    return lines


def _lines_of(node: ast.AST) -> set[int]:
    """Return the numbers of a node's lines, its decorators' with them."""
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    return set(range(start, node.end_lineno + 1))


def _guarding_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that guard."""
    guarding = {line for node in ast.walk(tree) if _guards(node) for line in _guard_lines(node)}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    private = [node for node in functions if node.name.startswith("_") and _returns_text(node)]
    # Until nothing is added: a message's helper may have a helper
    while True:
        others = (node for node in private if not _lines_of(node) <= guarding)
        helpers = [node for node in others if _only_guards_call(node, tree, guarding)]
        if not helpers:
            return guarding
        for node in helpers:
            guarding |= _lines_of(node)


def _guards(node: ast.AST) -> bool:
    """Return whether a node is a guard by itself."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return bool(GUARD_NAME.match(node.name))
    return isinstance(node, ast.Raise) or (isinstance(node, BLOCKS) and _leads_only_to_raise(node.body))


def _leads_only_to_raise(body: Sequence[ast.stmt]) -> bool:
    """Return whether statements contain a raise, and else nothing but the making of its message."""
    guards = [statement for statement in body if _guards(statement) and not _goes_on(statement)]
    rest = [statement for statement in body if statement not in guards]
    return bool(guards) and all(isinstance(statement, MESSAGE_PARTS) for statement in rest)


def _goes_on(statement: ast.stmt) -> bool:
    """Return whether a block does something else in its `else`, `except` or `finally`."""
    others = [*getattr(statement, "orelse", ()), *getattr(statement, "finalbody", ())]
    handlers = [line for handler in getattr(statement, "handlers", ()) for line in handler.body]
    return any(part and not _leads_only_to_raise(part) for part in (others, handlers))


def _guard_lines(node: ast.AST) -> set[int]:
    """Return the lines of a guard; an `else` or `except` that does something else is not part of it."""
    if isinstance(node, BLOCKS) and _goes_on(node):
        return set(range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1))
    return _lines_of(node)


def _returns_text(function: ast.FunctionDef) -> bool:
    """Return whether a function is annotated to return a str."""
    return isinstance(function.returns, ast.Name) and function.returns.id == "str"


def _only_guards_call(function: ast.FunctionDef, tree: ast.Module, guarding: set[int]) -> bool:
    """Return whether every mention of a function's name, outside itself, is in a line that guards."""
    own = _lines_of(function)
    mentions = [line for line in _mentions(function.name, tree) if line not in own]
    return bool(mentions) and all(line in guarding for line in mentions)


def _mentions(name: str, tree: ast.Module) -> Iterator[int]:
    """Yield the lines where a name is read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name:
            yield node.lineno


def _print_table(package: Path) -> None:
    """Print the table as Markdown."""
    wings = count_package(package)
    print("| wing | lines of code | guarding | share |\n|---|---|---|---|")
    for name, lines in sorted(wings.items(), key=lambda item: -item[1].guarding):
        print(f"| {name} | {lines.code:,} | {lines.guarding:,} | {lines.share:.1%} |")
    whole = total(wings)
    print(f"| all | {whole.code:,} | {whole.guarding:,} | {whole.share:.1%} |")


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    _print_table(root / "seqpar")
