"""The service as its clients see it: the real process, over loopback."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.translator import Translator
from recipes.translation.translating.alignments import align
from recipes.translation.translating.translate import SearchOptions, alternatives, translate
from tests.recipes.random_translator import random_translator
from tests.recipes.serve.running import Running, running

pytestmark = pytest.mark.launched

SENTENCES = [pair.source for pair in pairs(40, 3)]
LANGUAGES = {"source": "en", "target": "de"}


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    made = random_translator(tmp_path_factory.mktemp("serve"))
    config = replace(made.config, decoding=replace(made.config.decoding, beam=3))
    return replace(made, config=config)


@pytest.fixture(scope="module")
def run(translator: Translator) -> Path:
    folder = Path(translator.config.run)
    save_model(folder / "best", translator, {"step": 1})
    return folder


@pytest.fixture(scope="module")
def service(run: Path) -> Iterator[Running]:
    with running(run, run) as found:
        yield found


@pytest.fixture
def client(service: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60) as client:
        yield client


def translated(client: httpx.Client, q: object, **fields: object) -> Any:
    answer = client.post("/translate", json={"q": q, **LANGUAGES, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_concurrent_requests_are_answered_with_the_translations_of_the_command(
    service: Running, translator: Translator
) -> None:
    expected = translate(translator, SENTENCES)
    assert len(set(expected)) > 5

    async def all_at_once() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=service.url, timeout=120, limits=limits) as client:
            texts = [SENTENCES[number % len(SENTENCES)] for number in range(200)]
            return await asyncio.gather(*[client.post("/translate", json={"q": q, **LANGUAGES}) for q in texts])

    answers = asyncio.run(all_at_once())
    assert [answer.status_code for answer in answers] == [200] * 200
    assert [answer.json()["translatedText"] for answer in answers] == expected * 5


def test_a_document_keeps_its_lines(client: httpx.Client, translator: Translator) -> None:
    one, two = translate(translator, SENTENCES[:2])
    text = f"{SENTENCES[0]}\r\n\r\n\n{SENTENCES[1]}\n"
    assert translated(client, text)["translatedText"] == f"{one}\r\n\r\n\n{two}\n"
    assert translated(client, "")["translatedText"] == ""


def test_a_list_is_answered_with_a_list_and_with_alternatives_of_each(client: httpx.Client) -> None:
    single = [translated(client, q, alternatives=2) for q in SENTENCES[:2]]
    assert [len(set(one["alternatives"])) for one in single] == [2, 2]
    assert translated(client, SENTENCES[:2], alternatives=2) == {
        "translatedText": [one["translatedText"] for one in single],
        "alternatives": [one["alternatives"] for one in single],
    }


def test_a_form_is_answered_as_json_is(client: httpx.Client) -> None:
    form = client.post("/translate", data={"q": SENTENCES[0], **LANGUAGES, "alternatives": "1", "api_key": ""})
    assert form.json() == translated(client, SENTENCES[0], alternatives=1)


def test_a_query_string_is_answered_as_json_is(client: httpx.Client) -> None:
    fields = {"q": "Zwölf Züge.\nZwei 火车", **LANGUAGES, "alternatives": "1", "api_key": ""}
    expected = translated(client, fields["q"], alternatives=1)
    assert client.post("/translate", params=fields).json() == expected
    q = fields.pop("q")
    assert client.post("/translate", params=fields, json={"q": q}).json() == expected
    assert client.post("/translate", params=fields, data={"q": q}).json() == expected


def test_lines_of_the_page_are_translated_beside_one_that_cannot_be(client: httpx.Client) -> None:
    lines = ["a", "a " * 300, "\ud800", "two trains"]
    body = json.dumps({"lines": lines, "n_best": 2, "links": True})
    answer = client.post("/lines", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    first, long, odd, last = answer.json()["lines"]
    assert [first, last] == client.post("/lines", json={"lines": lines[::3], "n_best": 2, "links": True}).json()[
        "lines"
    ]
    assert list(long) == list(odd) == ["error"]
    assert long["error"].startswith("has 3")
    assert long["error"].endswith("split it into sentences, one per line")
    assert odd["error"].startswith("is not UTF-8 text")


def test_the_page_gets_the_alternatives_and_alignments_of_the_command(
    client: httpx.Client, translator: Translator
) -> None:
    asked = {"model": 1, "lines": SENTENCES[:4], "n_best": 3, "links": True}
    found = client.post("/lines", json=asked).json()["lines"]
    decoding = translator.config.decoding
    expected = alternatives(translator.with_decoding(decoding), SENTENCES[:4], SearchOptions(n_best=3))
    texts = [[one["text"] for one in line["translations"]] for line in found]
    assert texts == [[one.text for one in row] for row in expected]
    for line, row in zip(found, expected, strict=True):
        assert [one["score"] for one in line["translations"]] == pytest.approx([one.score for one in row], rel=1e-4)
        shown = [one["log_probability"] for one in line["translations"]]
        assert shown == pytest.approx([one.log_probability for one in row], rel=1e-4)
    links = align(translator.with_decoding(decoding), SENTENCES[:4], [row[0] for row in texts])
    assert any(links)
    assert [[tuple(link) for link in line["links"]] for line in found] == links
    assert [line["source_words"] for line in found] == [sentence.split() for sentence in SENTENCES[:4]]
    assert [line["target_words"] for line in found] == [row[0].split() for row in texts]


def test_script_in_the_input_is_text_in_the_answer_and_the_page_forbids_it(client: httpx.Client) -> None:
    answer = client.post("/lines", json={"lines": ["<script>alert(1)</script>"]})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["lines"][0]["source_words"] == ["<script>alert(1)</script>"]
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "http" not in page.text
    for path in ("/page.js", "/view.js", "/page.css", "/icon.svg"):
        assert client.get(path).status_code == 200


GOOD: dict[str, object] = {"q": "a", **LANGUAGES}


def connected(service: Running) -> socket.socket:
    at = urlsplit(service.url)
    return socket.create_connection((at.hostname, at.port), timeout=30)


HEAD = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_an_announced_size_above_the_limit_is_refused_before_the_body(service: Running) -> None:
    with connected(service) as connection:
        connection.sendall(HEAD + b"Content-Length: 99999999999\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_body_without_a_length_is_refused_at_the_limit(service: Running, client: httpx.Client) -> None:
    with connected(service) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n1\r\n \r\n")
        assert connection.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize(
    ("kind", "status"), [("application/json", 413), ("text/plain", 415), ("application/json; chunked", 413)]
)
def test_a_client_that_sends_eight_megabytes_before_it_reads_gets_its_answer(
    kind: str, status: int, service: Running
) -> None:
    body = b" " * 2**23
    with connected(service) as connection:
        head = f"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        if kind.endswith("chunked"):
            connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n800000\r\n".encode() + body + b"\r\n0\r\n\r\n")
        else:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(12) == f"HTTP/1.1 {status}".encode()


def test_a_slow_client_does_not_hold_up_others(service: Running, client: httpx.Client) -> None:
    body = json.dumps(GOOD).encode()
    with connected(service) as slow:
        slow.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode())
        for number in range(len(body)):
            slow.sendall(body[number : number + 1])
            if number % 10 == 0:
                translated(client, "a")
        assert slow.recv(12) == b"HTTP/1.1 200"


def test_languages_models_and_what_does_not_exist(client: httpx.Client) -> None:
    assert client.get("/languages").json() == [{"code": "en", "name": "en", "targets": ["de"]}]
    assert [(one["engine"], one["beam"], one["aligns"]) for one in client.get("/models").json()] == [
        ("torch", 3, True)
    ] * 2
    assert client.post("/detect", data={"q": "a"}).json()["error"].startswith("POST /detect does not exist here")
    assert client.get("/nothing").json()["error"].startswith("GET /nothing does not exist here")
    assert client.get("/translate").json()["error"].startswith("GET /translate does not exist here")


def stopped(service: Running, number: signal.Signals) -> int:
    """Send a signal while a request's body is on its way; check that it is answered, and return the exit status."""
    with connected(service) as connection:
        body = json.dumps({**GOOD, "q": "\n".join(SENTENCES)}).encode()
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body[:-1])
        time.sleep(0.3)
        service.process.send_signal(number)
        time.sleep(0.3)
        connection.sendall(body[-1:])
        assert connection.recv(12) == b"HTTP/1.1 200"
    return service.process.wait(30)


def test_a_second_ctrl_c_answers_what_is_cut_off_with_503_and_no_traceback(run: Path) -> None:
    with running(run) as service, connected(service) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.3)
        service.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        service.process.send_signal(signal.SIGINT)
        answer = connection.makefile("rb").read()
        assert service.process.wait(30) == 130
        assert answer.startswith(b"HTTP/1.1 503")
        assert answer.endswith(b'{"error":"the service is stopping: send the request again later"}')
        assert "Traceback" not in service.process.stdout.read()


def test_ctrl_c_answers_what_has_arrived_and_ends_with_130(run: Path) -> None:
    with running(run) as service:
        assert stopped(service, signal.SIGINT) == 130


def test_sigterm_answers_what_has_arrived_and_ends_the_process(service: Running) -> None:
    assert stopped(service, signal.SIGTERM) == -signal.SIGTERM  # the last test: the service has ended
