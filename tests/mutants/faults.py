"""Faults of the kinds that have lived in code like this, found in a file by its syntax tree.

A fault replaces some bytes of the file: an edge of a comparison, an argument that is left out, a mask, a dtype, a lock.
What is planted is one small mistake that still parses, and that a reader might overlook.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

EDGES: dict[type[ast.cmpop], tuple[bytes, bytes]] = {
    ast.Lt: (b"<", b"<="),
    ast.LtE: (b"<=", b"<"),
    ast.Gt: (b">", b">="),
    ast.GtE: (b">=", b">"),
    ast.Eq: (b"==", b"!="),
    ast.NotEq: (b"!=", b"=="),
    ast.Is: (b"is", b"is not"),
    ast.IsNot: (b"is not", b"is"),
}
NARROWER = {b"float64": b"float32", b"float32": b"bfloat16", b"int64": b"int32", b"double": b"float"}
MASKS = ("where", "masked_fill", "masked_fill_")
MODULES = (b"torch", b"tl", b"numpy", b"np")
"""Whose `where` chooses from its arguments, and which have dtypes."""
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
GUARDED = re.compile(rb"fsync|flock|(?<![a-z])lock\b|_changed\b")
KEYED = re.compile(r"key|cache|seen|known|identity|signature", re.IGNORECASE)


class Fault(NamedTuple):
    """Bytes of a file, and what is in their place."""

    path: str
    line: int
    kind: str
    begin: int
    end: int
    new: bytes

    def planted(self, source: bytes) -> bytes:
        """Return the file with the fault."""
        return source[: self.begin] + self.new + source[self.end :]

    def diff(self, root: Path) -> str:
        """Return the fault as a unified diff with a line of context."""
        source = (root / self.path).read_bytes()
        texts = [text.decode().splitlines() for text in (source, self.planted(source))]
        return "\n".join(difflib.unified_diff(*texts, self.path, self.kind, n=1, lineterm=""))

    def key(self, root: Path) -> str:
        """Return what a list of equivalent faults knows it by, wherever in its file the line is."""
        source = (root / self.path).read_bytes()
        text = source.decode().splitlines()[self.line - 1].strip()
        return f"{self.path}: {self.kind}: {text} -> {self.new.decode()}"


def faults_of(path: str, source: bytes) -> list[Fault]:
    """Return all faults of a file, in the order of its lines; the few that do not parse are among them."""
    return sorted(set(_Finder(path, source).all()), key=lambda fault: (fault.begin, fault.end, fault.kind))


def parses(source: bytes) -> bool:
    """Return whether a file is Python."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.tree = ast.parse(source)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def all(self) -> Iterator[Fault]:
        """Yield the faults of each node that runs."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.expr | ast.stmt | ast.ExceptHandler) and not self._only_says(node):
                finder = getattr(self, f"_{type(node).__name__.lower()}", None)
                if finder:
                    yield from finder(node)

    def _only_says(self, node: ast.AST) -> bool:
        """Return whether a node is in an annotation, in an error's message, or only for type checkers."""
        child = node
        while (parent := self.parents.get(child)) is not None:
            if child is getattr(parent, "annotation", None) or child is getattr(parent, "returns", None):
                return True
            if isinstance(parent, ast.Raise | ast.JoinedStr | ast.Assert):
                return True
            if isinstance(parent, ast.If) and "TYPE_CHECKING" in ast.dump(parent.test):
                return True
            child = parent
        return False

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        begin = self.starts[node.lineno - 1] + node.col_offset
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> bytes:
        begin, end = self._span(node)
        return self.source[begin:end]

    def _fault(self, node: ast.AST, kind: str, span: tuple[int, int], new: bytes) -> Fault:
        return Fault(self.path, node.lineno, kind, *span, new)  # type: ignore[attr-defined]

    def _compare(self, node: ast.Compare) -> Iterator[Fault]:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            gap = self._span(left)[1], self._span(right)[0]
            between = self.source[slice(*gap)]
            if type(operator) in EDGES and EDGES[type(operator)][0] in between:
                yield self._fault(node, "comparison", gap, between.replace(*EDGES[type(operator)], 1))
            left = right

    def _boolop(self, node: ast.BoolOp) -> Iterator[Fault]:
        gap = self._span(node.values[0])[1], self._span(node.values[1])[0]
        between = self.source[slice(*gap)]
        words = (b"and", b"or") if isinstance(node.op, ast.And) else (b"or", b"and")
        yield self._fault(node, "condition", gap, between.replace(*words, 1))

    def _if(self, node: ast.If | ast.IfExp) -> Iterator[Fault]:
        yield self._fault(node.test, "condition", self._span(node.test), b"not (" + self._text(node.test) + b")")

    _ifexp = _if

    def _call(self, node: ast.Call) -> Iterator[Fault]:
        given: list[ast.AST] = [*node.args, *node.keywords]
        for place, each in enumerate(given):
            if isinstance(each, ast.keyword) and each.arg and not self._makes_no_difference(node, each):
                begin, end = self._span(each)
                if place:
                    begin = self._span(given[place - 1])[1]
                yield self._fault(each, "dropped argument", (begin, end), b"")
        names = [self._text(each) for each in node.args[:2] if isinstance(each, ast.Name)]
        if len(set(names)) == 2:
            first, second = self._span(node.args[0]), self._span(node.args[1])
            swapped = self._text(node.args[1]) + self.source[first[1] : second[0]] + self._text(node.args[0])
            yield self._fault(node, "swapped operands", (first[0], second[1]), swapped)
        if isinstance(node.func, ast.Attribute) and node.func.attr in MASKS:
            kept: ast.AST = node.func.value
            if self._text(kept) in MODULES and len(node.args) == 3:
                kept = node.args[1]
            if self._text(kept) not in MODULES:
                yield self._fault(node, "mask dropped", self._span(node), self._text(kept))

    def _makes_no_difference(self, call: ast.AST, argument: ast.keyword) -> bool:
        """Return whether nothing depends on an argument where the rest is right: `strict` of zip, and texts of help."""
        if argument.arg in ("metavar", "help"):
            return True
        return argument.arg == "strict" and isinstance(call, ast.Call) and ast.unparse(call.func) == "zip"

    def _binop(self, node: ast.BinOp) -> Iterator[Fault]:
        if not isinstance(node.op, ORDERED) or isinstance(node.left, ast.Constant | ast.JoinedStr):
            return
        if self._text(node.left) == self._text(node.right):
            return
        left, right = self._span(node.left), self._span(node.right)
        swapped = b"(" + self._text(node.right) + b")" + self.source[left[1] : right[0]] + b"(" + self._text(node.left)
        yield self._fault(node, "swapped operands", self._span(node), swapped + b")")

    def _constant(self, node: ast.Constant) -> Iterator[Fault]:
        changed = _changed(node.value)
        parent = self.parents[node]
        if changed is None or isinstance(parent, ast.Slice):
            return
        if isinstance(parent, ast.keyword) and self._makes_no_difference(self.parents[parent], parent):
            return
        kind = "constant"
        if isinstance(parent, ast.arguments) or (isinstance(parent, ast.AnnAssign) and self._is_field(parent)):
            kind = "default"
        yield self._fault(node, kind, self._span(node), changed)

    def _is_field(self, node: ast.AnnAssign) -> bool:
        return isinstance(self.parents[node], ast.ClassDef)

    def _attribute(self, node: ast.Attribute) -> Iterator[Fault]:
        narrower = NARROWER.get(node.attr.encode())
        called = isinstance(parent := self.parents[node], ast.Call) and parent.func is node
        if narrower and (called or self._text(node.value) in MODULES):
            end = self._span(node)[1]
            yield self._fault(node, "dtype", (end - len(node.attr), end), narrower)

    def _expr(self, node: ast.Expr) -> Iterator[Fault]:
        if isinstance(node.value, ast.Call | ast.Await):
            yield self._dropped(node)

    def _augassign(self, node: ast.AugAssign) -> Iterator[Fault]:
        yield self._dropped(node)

    def _assign(self, node: ast.Assign) -> Iterator[Fault]:
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            yield self._dropped(node)
        if isinstance(node.value, ast.Tuple) and KEYED.search(ast.unparse(node.targets[0])):
            yield from self._shorter(node.value)

    def _subscript(self, node: ast.Subscript) -> Iterator[Fault]:
        if isinstance(node.slice, ast.Tuple) and KEYED.search(ast.unparse(node.value)):
            yield from self._shorter(node.slice)

    def _return(self, node: ast.Return) -> Iterator[Fault]:
        function: ast.AST = node
        while not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            function = self.parents[function]
        if isinstance(node.value, ast.Tuple) and KEYED.search(function.name):
            yield from self._shorter(node.value)

    def _shorter(self, node: ast.Tuple) -> Iterator[Fault]:
        if len(node.elts) > 1:
            kept = b", ".join(self._text(each) for each in node.elts[:-1])
            yield self._fault(node, "key shortened", self._span(node), b"(" + kept + b",)")

    def _dropped(self, node: ast.stmt) -> Fault:
        kind = "lock dropped" if GUARDED.search(self._text(node)) else "dropped statement"
        return self._fault(node, kind, self._span(node), b"pass")

    def _with(self, node: ast.With) -> Iterator[Fault]:
        for item in node.items:
            if item.optional_vars is None and GUARDED.search(self._text(item.context_expr)):
                nothing = b'__import__("contextlib").nullcontext()'
                yield self._fault(node, "lock dropped", self._span(item.context_expr), nothing)

    def _excepthandler(self, node: ast.ExceptHandler) -> Iterator[Fault]:
        if isinstance(node.type, ast.Tuple):
            yield self._fault(node, "exception narrowed", self._span(node.type), self._text(node.type.elts[0]))
        elif node.type is not None:
            yield self._fault(node, "exception narrowed", self._span(node.type), b"ZeroDivisionError")


def _changed(value: object) -> bytes | None:
    """Return another constant of the same type; None for those that are not changed."""
    if isinstance(value, bool):
        return str(not value).encode()
    if isinstance(value, int):
        return str(value + 1).encode()
    if isinstance(value, float):
        return repr(2 * value or 1.0).encode()
    return None
