"""The faults of `python -m tests.mutants` are those of their kind, and what the tests say of one is what they found."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import seqpar
from seqpar.testing.ranks import Pool
from tests.mutants import __main__ as main
from tests.mutants.__main__ import Outcome, confirmed, copies, drawn, report, tried
from tests.mutants.faults import Fault, faults_of
from tests.mutants.reach import ROOT, Recorder
from tests.mutants.record import CODE, Reach, collected, lines_now, read, take_over

CHUNKS = "seqpar/core/chunks.py"
NOTICES = "tests/seqpar/core/test_parts.py::test_rows_per_chunk_follows_the_budget_down_to_what_keeps_the_products_busy"


@pytest.mark.parametrize(
    ("code", "kind", "planted"),
    [
        ("a < b", "comparison", "a <= b"),
        ("a is None", "comparison", "a is not None"),
        ("a and b", "condition", "a or b"),
        ("if a: b", "condition", "if not (a): b"),
        ("f(a, x=g, y=h)", "dropped argument", "f(a, y=h)"),
        ("f(a, b)", "swapped operands", "f(b, a)"),
        ("a - b", "swapped operands", "(b) - (a)"),
        ("x = 3", "constant", "x = 4"),
        ("x = 0.0", "constant", "x = 1.0"),
        ("def f(x=True): ...", "default", "def f(x=False): ..."),
        ("x.to(torch.float64)", "dtype", "x.to(torch.float32)"),
        ("a += b", "dropped statement", "pass"),
        ("self.a = b", "dropped statement", "pass"),
        ("os.fsync(a)", "lock dropped", "pass"),
        ("with self.lock: a", "lock dropped", 'with __import__("contextlib").nullcontext(): a'),
        ("y = torch.where(a, b, c)", "mask dropped", "y = b"),
        ("y = tl.where(a, b, c)", "mask dropped", "y = b"),
        ("y = x.double()", "dtype", "y = x.float()"),
        ("lock(a)", "lock dropped", "pass"),
        ("y = x.masked_fill(a, 0)", "mask dropped", "y = x"),
        ("try: a\nexcept (B, C): d", "exception narrowed", "try: a\nexcept B: d"),
        ("try: a\nexcept B: d", "exception narrowed", "try: a\nexcept ZeroDivisionError: d"),
        ("key = (a, b)", "key shortened", "key = (a,)"),
    ],
)
def test_a_fault_is_one_small_mistake(code: str, kind: str, planted: str) -> None:
    texts = [fault.planted(code.encode()).decode() for fault in faults_of("a.py", code.encode()) if fault.kind == kind]
    assert planted in texts


@pytest.mark.parametrize(
    "code",
    [
        "raise E(3)",
        "x: Literal[3]",
        "def f() -> Literal[3]: ...",
        "assert a < b",
        "f'{3}'",
        "x = zip(a, strict=True)",
        "x = f(help=3)",
        "x = f(a, a)",
        "x = a - a",
        "x = lengths.double",
    ],
)
def test_messages_annotations_checks_of_what_always_holds_and_what_changes_nothing_have_none(code: str) -> None:
    assert faults_of("a.py", code.encode()) == []


def test_a_block_is_no_lock() -> None:
    assert {fault.kind for fault in faults_of("a.py", b"block(a)")} == {"dropped statement"}


def test_the_same_seed_draws_the_same_faults_of_many_kinds() -> None:
    first, again, other = (drawn(["seqpar/core"], 20, seed) for seed in ("1", "1", "2"))
    assert first == again != other
    assert len({fault.kind for fault in first}) > 5


def planted_in(text: str, new: str) -> Fault:
    source = (ROOT / CHUNKS).read_bytes()
    begin = source.index(text.encode())
    return Fault(CHUNKS, source[:begin].count(b"\n") + 1, "by hand", begin, begin + len(text), new.encode())


def verdicts_of(*faults: Fault, tests: Sequence[str]) -> list[str]:
    reach = Reach(dict.fromkeys(tests, 1.0), {CHUNKS: {fault.line: frozenset(tests) for fault in faults}})
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "pytest", "hypothesis", "numpy"])
    with copies(1) as lent:
        outcomes = [tried(fault, reach, lent) for fault in faults]
    assert report(outcomes).count("---") >= sum(outcome.verdict != "caught" for outcome in outcomes)
    assert all(outcome.failed in ("", *tests) for outcome in outcomes)
    return [outcome.verdict for outcome in outcomes]


def test_a_fault_is_caught_if_a_test_fails_and_survives_if_all_pass() -> None:
    noticed = planted_in("narrow_factor = 2\n", "narrow_factor = 3\n")
    broken = planted_in("from torch import Tensor\n", "from torch import Tensors\n")
    comment = planted_in("Bytes of one chunk's logits on a CPU", "Bites of one chunk's logits on a CPU")
    assert verdicts_of(noticed, broken, comment, tests=[NOTICES]) == ["caught", "caught", "survived"]


def test_a_line_that_no_test_reaches_has_those_of_the_block_around_it_or_of_its_wing() -> None:
    default = planted_in("narrow_factor = 2\n", "narrow_factor = 3\n")
    source = (ROOT / CHUNKS).read_text().splitlines()
    beside = next(line for line in range(default.line - 1, 0, -1) if source[line - 1].startswith("def ")) + 1
    seconds = dict.fromkeys(["tests/models/a.py::a", "tests/seqpar/core/b.py::b", "tests/seqpar/core/c.py::c"], 1.0)
    reached = {beside: frozenset(["tests/models/a.py::a", "tests/seqpar/core/c.py::c"])}
    chosen = ["tests/seqpar/core/c.py::c", "tests/models/a.py::a"]
    assert Reach(seconds, {CHUNKS: reached}).tests_of(default) == chosen
    assert Reach(seconds, {}).tests_of(default) == ["tests/seqpar/core/b.py::b", "tests/seqpar/core/c.py::c"]


def test_the_test_that_happens_to_import_a_file_first_is_not_the_one_of_its_defaults_and_constants() -> None:
    constant = planted_in("CPU_BUDGET = 16 * 2**20\n", "CPU_BUDGET = 17 * 2**20\n")
    beside = planted_in("    narrow_factor = 2\n", "    narrow_factor = 3\n").line
    reached = {constant.line: frozenset(["tests/models/first.py::a"]), beside: frozenset(["tests/models/b.py::b"])}
    seconds = dict.fromkeys(["tests/models/first.py::a", "tests/models/b.py::b", "tests/seqpar/core/c.py::c"], 1.0)
    chosen = ["tests/seqpar/core/c.py::c", "tests/models/b.py::b"]  # the wing's own, too: one may read all constants
    assert Reach(seconds, {CHUNKS: reached}).tests_of(constant) == chosen


def classes(rank: int, world: int) -> int:
    return seqpar.VocabShard.of(3, None).vocab_size


def test_what_a_test_reaches_in_its_ranks_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "call", Pool.call)  # which the recorder replaces
    recorder = Recorder(tmp_path)
    protocol = recorder.pytest_runtest_protocol(SimpleNamespace(nodeid="tests/a.py::a"))
    next(protocol)
    pool = Pool(1)
    assert pool.call(classes) == [3]
    pool.close()
    protocol.close()
    recorder.pytest_sessionfinish()
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    path = "seqpar/distributed/vocab_parallel.py"
    source = (ROOT / path).read_text().splitlines()
    of = next(place for place, line in enumerate(source, 1) if line.startswith("        return cls(group, sum(rows[:"))
    assert [name for name, _ in found["tests"]] == ["tests/a.py::a"]
    assert found["lines"][path][str(of)] == [0]


def test_a_record_is_taken_over_but_for_files_of_tests_that_changed_or_have_new_ones(tmp_path: Path) -> None:
    earlier, now = tmp_path / "earlier", tmp_path / "now"
    old = {
        "a.py": "one\ntwo\nthree\n",
        "tests/test_same.py": "1",
        "tests/test_other.py": "1",
        "tests/test_more.py": "1",
    }
    tests = [
        (name, 2.0)
        for name in ("tests/test_same.py::a", "tests/test_other.py::b", "tests/test_more.py::c", "gone.py::d")
    ]
    for folder in (earlier, now):
        folder.mkdir()
    (earlier / CODE).write_text(json.dumps(old))
    lines = {"a.py": {1: [0, 1, 3], 2: [0], 3: [2]}, "gone.py": {1: [0]}}
    (earlier / "1.json").write_text(json.dumps({"tests": tests, "lines": lines}))
    code = {**old, "a.py": "zero\none\nthree\n", "tests/test_other.py": "2"}
    names = [*(name for name, _ in tests[:3]), "tests/test_more.py::new"]
    assert take_over(earlier, now, code, names) == ["tests/test_more.py", "tests/test_other.py"]
    (now / CODE).write_text(json.dumps(code))
    found = read(now)
    assert found.seconds == {"tests/test_same.py::a": 2.0}
    assert found.lines == {"a.py": {2: frozenset(["tests/test_same.py::a"]), 3: frozenset()}}


def test_the_tests_of_a_folder_are_collected_by_name() -> None:
    names = collected(["tests/seqpar/core/test_parts.py"])
    assert NOTICES in names
    assert all(name.startswith("tests/seqpar/core/test_parts.py::") for name in names)


def test_lines_are_followed_to_where_they_are_now() -> None:
    assert lines_now("a\nb\nc\n", "x\na\nc\nb\nc\n") == {1: 2, 2: 4, 3: 5}


def test_tests_that_cannot_run_do_not_catch_a_fault() -> None:
    noticed = planted_in("narrow_factor = 2\n", "narrow_factor = 3\n")
    assert verdicts_of(noticed, tests=["tests/nowhere.py"]) == ["not run"]


def test_a_test_that_fails_without_the_fault_has_not_noticed_it() -> None:
    fault = planted_in("narrow_factor = 2\n", "narrow_factor = 3\n")
    caught = [Outcome(fault, "caught", 1.0, NOTICES)]
    reach = Reach({NOTICES: 1.0}, {})
    with copies(1) as lent:
        sound = confirmed(caught, reach, lent)
        copy = lent.get()
        (copy / CHUNKS).write_bytes(fault.planted((ROOT / CHUNKS).read_bytes()))
        lent.put(copy)
        broken = confirmed(caught, reach, lent)
    assert [outcome.verdict for outcome in (*sound, *broken)] == ["caught", "not run"]


def test_each_fault_that_changes_nothing_is_one_of_the_code_and_has_a_reason() -> None:
    for key, reason in json.loads(main.EQUIVALENT.read_text()).items():
        path = key.partition(":")[0]
        assert key in {fault.key(ROOT) for fault in faults_of(path, (ROOT / path).read_bytes())}, key
        assert len(reason.split()) > 5
