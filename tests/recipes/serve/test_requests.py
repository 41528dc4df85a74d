"""What a request may be, and how any other is refused: the application, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from recipes.translation.serve.app import Guard
from tests.recipes.serve.recorder import Recorder
from tests.recipes.serve.serving import GOOD, asked, serving


@pytest.fixture(scope="module")
def model() -> Recorder:
    model = Recorder(beam=3)
    model.gate.set()
    return model


@pytest.fixture(scope="module")
def app(model: Recorder) -> Iterator[Guard]:
    with serving(model, loopback=True) as app:
        yield app


@pytest.mark.parametrize(
    ("path", "fields", "wishes"),
    [
        ("/translate", GOOD, (1, False)),
        ("/translate", {**GOOD, "alternatives": 1}, (2, False)),
        ("/lines", {"lines": ["a"]}, (1, False)),
        ("/lines", {"lines": ["a"], "n_best": 3, "links": True}, (3, True)),
    ],
)
def test_nothing_is_searched_or_linked_that_was_not_asked_for(
    path: str, fields: dict[str, object], wishes: tuple[int, bool], app: Guard, model: Recorder
) -> None:
    assert asked(app, "POST", path, json=fields).status_code == 200
    assert model.wishes[-1] == wishes


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("q=b", "'q' is given twice: send it once"),
        ("alternatives=0&alternatives=1", "'alternatives' is given twice"),
        ("altrnatives=1", "unknown field 'altrnatives'; did you mean alternatives?"),
        ("api_key=%ff", "the query string is not a form in UTF-8"),
        ("api_key", "the query string is not a form in UTF-8"),
    ],
)
def test_a_query_string_that_cannot_be_read_is_answered_with_one_line(query: str, message: str, app: Guard) -> None:
    answer = asked(app, "POST", f"/translate?{query}", json=GOOD)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]


@pytest.mark.parametrize(
    ("status", "fields", "message"),
    [
        (400, {"source": "en", "target": "de"}, "q is the text to translate"),
        (400, {**GOOD, "q": [1]}, "q is the text to translate"),
        (400, {**GOOD, "source": "fr"}, "'fr' to 'de' is not supported: the models here translate en to de"),
        (400, {**GOOD, "target": "\ud800"}, "is not supported"),
        (400, {**GOOD, "source": "auto"}, "languages are not detected here"),
        (400, {"q": "a", "target": "de"}, "source is missing: name a language, one of en"),
        (400, {**GOOD, "format": "html"}, "format is 'html': only text is translated"),
        (400, {**GOOD, "alternatives": 3}, "alternatives is 3: send a whole number from 0 to 2"),
        (400, {**GOOD, "alternatives": True}, "alternatives is True"),
        (400, {**GOOD, "altrnatives": 1}, "unknown field 'altrnatives'; did you mean alternatives?"),
        (400, {"source": "en", "target": "de", "text": "a"}, "unknown field 'text'; the fields are q, source, target"),
        (400, {**GOOD, "q": "a\nlong"}, "line 2 is too long"),
        (413, {**GOOD, "q": "\n" * 1000}, "the text has 1,001 lines, and at most 1,000 are"),
        (413, {**GOOD, "q": "a" * 50_001}, "the text has 50,001 characters, and at most 50,000 are"),
    ],
)
def test_what_cannot_be_translated_is_answered_with_one_line(
    status: int, fields: dict[str, object], message: str, app: Guard
) -> None:
    body = json.dumps(fields)  # in ASCII, with escapes
    answer = asked(app, "POST", "/translate", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    ("status", "kind", "body", "message"),
    [
        (400, "application/json", b"{", "the body is not JSON"),
        (400, "application/json", b"[" * 100_000, "the body is not JSON"),
        (400, "application/json", b"[]", "the body is not a JSON object"),
        (400, "application/json", b'{"q": "\xff"}', "the body is not UTF-8 text, at byte 7"),
        (400, "application/x-www-form-urlencoded", b"q=%ff", "the body is not a form in UTF-8"),
        (400, "application/x-www-form-urlencoded", b"q=a&q=b", "'q' is given twice: send it once"),
        (400, "application/json", b'{"q": "a", "source": "en", "q": "b", "target": "de"}', "'q' is given twice"),
        (400, "application/json", b'{"q": [{"a": 1, "a": 2}]}', "'a' is given twice"),
        (415, "text/plain", b"{}", "Content-Type is text/plain"),
        (
            415,
            "multipart/form-data; boundary=x",
            b"--x--",
            "Content-Type is multipart/form-data: send application/json",
        ),
        (413, "application/json", b" " * (2**20 + 1), "the body has 1,048,577 bytes, and at most 1,048,576 are read"),
    ],
)
def test_a_body_that_cannot_be_read_is_answered_with_one_line(
    status: int, kind: str, body: bytes, message: str, app: Guard
) -> None:
    answer = asked(app, "POST", "/translate", content=body, headers={"Content-Type": kind})
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]


def test_another_sites_name_for_this_machine_is_refused(app: Guard) -> None:
    for host in ("evil.example:80", "localhost.evil.example", "", "127.0.0.1.evil.example"):
        answer = asked(app, "GET", "/health", headers={"Host": host})
        assert (answer.status_code, answer.text) == (400, "Invalid host header")
    for host in ("localhost:5000", "127.0.0.1", "[::1]:80"):
        assert asked(app, "GET", "/health", headers={"Host": host}).json() == {"status": "ok"}


FROM: dict[str, tuple[dict[str, str], int]] = {
    "a program": ({}, 200),
    "the page": ({"Sec-Fetch-Site": "same-origin", "Origin": "http://of.a.proxy"}, 200),
    "the page in a browser without Sec-Fetch-Site": ({"Host": "localhost:80", "Origin": "http://localhost:80"}, 200),
    "another site": ({"Sec-Fetch-Site": "cross-site", "Origin": "http://evil.example"}, 403),
    "another port": ({"Sec-Fetch-Site": "same-site"}, 403),
    "another site in a browser without Sec-Fetch-Site": ({"Origin": "http://evil.example"}, 403),
    "a page without a site": ({"Origin": "null"}, 403),
}


@pytest.mark.parametrize("name", FROM)
def test_a_page_of_another_site_cannot_fill_the_queue(name: str, app: Guard) -> None:
    headers, status = FROM[name]
    for answer in (
        asked(app, "POST", "/translate", data=GOOD, headers=headers),
        asked(app, "POST", "/translate", content=b"{" * 100, headers={"Content-Type": "text/plain", **headers}),
    )[: 1 + (status == 403)]:
        assert answer.status_code == status, answer.text
        assert ("error" in answer.json()) == (status == 403)
