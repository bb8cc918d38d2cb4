"""A server's completions under audit: every format of ids, sound and unsound servers, errors."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from outpace import OptionError, SamplingParams
from outpace.audit import EndpointSystem, PlainScorer, audit_greedy, audit_samples
from outpace.drafters import ModelDrafter
from outpace.errors import EndpointError
from outpace.generator import Generator
from outpace.models import MarkovModel

V = 8
EOS = 3
TARGET = MarkovModel.random(V, 2, 0, sharpness=1.5)
DRAFT = MarkovModel(0.5 * TARGET.table + 0.5 * MarkovModel.random(V, 2, 1, sharpness=1.5).table)
PROMPTS = [[1], [2, 0]]
PLAIN = SamplingParams(temperature=1.0, max_new_tokens=5)
SAMPLES = 600

FORMATS = {
    "token_ids": lambda ids: {"token_ids": ids},
    "tokens": lambda ids: {"tokens": ids},
    "content": lambda ids: {"logprobs": {"content": [{"id": i, "logprob": -1.0} for i in ids]}},
    "spelled": lambda ids: {"logprobs": {"tokens": [f"token_id:{i}" for i in ids]}},
    "text": lambda ids: {"token_ids": None, "logprobs": None},
}


def understood(body, ignored=()) -> SamplingParams:
    """The parameters of a request, as servers read them."""
    ends = body["stop_token_ids"]
    fields = {
        "temperature": body["temperature"],
        "top_p": body["top_p"],
        "top_k": None if body["top_k"] == -1 else body["top_k"],
        "min_p": body["min_p"],
        "repetition_penalty": body["repetition_penalty"],
        "presence_penalty": body["presence_penalty"],
        "frequency_penalty": body["frequency_penalty"],
        "logit_bias": {int(i): x for i, x in (body["logit_bias"] or {}).items()},
        "min_new_tokens": body["min_tokens"],
        "eos_token_ids": tuple(ends or ()) if body["ignore_eos"] else None,
    }
    kept = {name: value for name, value in fields.items() if name not in ignored}
    return SamplingParams(max_new_tokens=body["max_tokens"], **kept)


class Completions:
    """What a server says, from an engine of ours.

    Args:
        ids: how it gives token ids.
        many: whether it knows `n`.
        keeps_end: whether the EOS token is among the ids.
        ignored: parameters that it ignores.
    """

    def __init__(self, ids="token_ids", many=True, keeps_end=False, ignored=(), **forced):
        self.ids, self.many, self.keeps_end = FORMATS[ids], many, keeps_end
        self.ignored, self.forced = ignored, forced
        self.generator = Generator(TARGET, ModelDrafter(DRAFT), 3, eos=(EOS,), max_batch=16)
        self.fresh = itertools.count(10_000)
        self.bodies: list[dict] = []
        self.headers: list[dict] = []

    def __call__(self, body):
        self.bodies.append(body)
        params = replace(understood(body, self.ignored), **self.forced)
        count = body.get("n", 1) if self.many else 1
        seeds = [body["seed"]] if "seed" in body else [next(self.fresh) for _ in range(count)]
        results = self.generator.generate([body["prompt"]] * count, params=params, seed=seeds)
        return 200, json.dumps({"choices": [self.choice(r) for r in results]})

    def choice(self, result):
        ids, stopped = list(result.token_ids), result.finish_reason == "stop"
        if stopped and not self.keeps_end:
            ids.pop()
        text = "".join(chr(97 + i) for i in ids if i != EOS)
        return {"text": text, "finish_reason": result.finish_reason} | self.ids(ids)


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Clients that go away are none of the server's concern."""


@pytest.fixture
def serve():
    """Starts a server; gives its URL."""
    running = []

    def start(answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                if self.path != "/v1/completions":
                    self.send_error(404)
                    return
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if isinstance(answer, Completions):
                    answer.headers.append(dict(self.headers))
                status, said = answer(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(said.encode())

            def log_message(self, *details):
                pass

        server = Server(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


def audit(url, params=PLAIN, samples=SAMPLES, **options):
    system = EndpointSystem(url, "target", eos=(EOS,), **options)
    return audit_samples(system, PlainScorer(TARGET, (EOS,)), PROMPTS, params, samples=samples)


# --- sound servers, and others -----------------------------------------------------------------


@pytest.mark.parametrize("ids", ["token_ids", "tokens", "content", "spelled"])
@pytest.mark.parametrize("keeps_end", [False, True])
def test_ids_are_read_wherever_they_are(ids, keeps_end, serve):
    server = Completions(ids, keeps_end=keeps_end)
    found = audit(serve(server))
    assert found.sound, found.summary()
    assert found.samples == SAMPLES
    assert found.tokens < SAMPLES * PLAIN.max_new_tokens
    assert found.repeated is None
    assert len(server.bodies) < SAMPLES / 8


def test_a_server_that_knows_no_n_is_asked_more_often(serve):
    server = Completions(many=False)
    found = audit(serve(server), samples=240)
    assert found.sound, found.summary()
    assert len(server.bodies) == 240


def test_samples_that_are_asked_for_alone_have_seeds_of_their_own(serve):
    server = Completions()
    url = serve(server)
    system = EndpointSystem(url, "target", eos=(EOS,), together=1)
    texts = system.sample([1], PLAIN, range(20))
    assert [body["seed"] for body in server.bodies] == list(range(20))
    assert not any("n" in body for body in server.bodies)
    assert texts == system.sample([1], PLAIN, range(20))
    results = server.generator.generate([[1]] * 20, params=PLAIN, seed=list(range(20)))
    assert texts == [list(r.token_ids) for r in results]


def test_greedy_texts(serve):
    params = SamplingParams(max_new_tokens=20)
    scorer = PlainScorer(TARGET, (EOS,))
    for forced, sound in (({}, True), ({"temperature": 1.0}, False)):
        system = EndpointSystem(serve(Completions(**forced)), "target", eos=(EOS,))
        assert audit_greedy(system, scorer, PROMPTS, params).sound is sound


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.6}, {"top_k": 2}, {"min_p": 0.2}, {"eos_token_ids": ()}]
)
def test_a_server_that_samples_otherwise_is_found(wrong, serve):
    found = audit(serve(Completions(**wrong)))
    assert not found.sound
    assert "not the target's" in found.summary()


PARAMETERS = [
    {"top_k": 3, "temperature": 1.3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 6.0},
    {"frequency_penalty": 6.0},
    {"logit_bias": {0: 2.0, 5: -1.0}},
    {"min_new_tokens": 3},
    {"eos_token_ids": (5,)},
    {"eos_token_ids": ()},
]


@pytest.mark.parametrize("fields", PARAMETERS, ids=lambda fields: "-".join(fields))
def test_every_parameter_reaches_the_server(fields, serve):
    params = replace(PLAIN, **fields)
    found = audit(serve(Completions()), params, samples=300)
    assert found.sound, found.summary()
    assert not audit(serve(Completions(ignored=tuple(fields))), params).sound


@pytest.mark.parametrize(
    "fields",
    [
        {"no_repeat_ngram": 2},
        {"bad_words": ((1,),)},
        {"json_schema": True},
        {"regex": "a"},
        {"grammar": 'start: "a"'},
        {"transforms": (lambda ids, scores: scores,)},
        {"logit_bias": {1: float("-inf")}},
        {"stop": ("a",)},
    ],
)
def test_what_servers_have_no_name_for_is_refused_by_name(fields, serve):
    server = Completions()
    system = EndpointSystem(serve(server), "target")
    (name,) = fields
    with pytest.raises(OptionError, match=name):
        system.sample([1], replace(PLAIN, **fields), [0])
    assert not server.bodies


def test_the_key_goes_into_the_header_and_nowhere_else(serve):
    server = Completions()
    system = EndpointSystem(serve(server), "target", eos=(EOS,), key="secret")
    system.sample([1], PLAIN, [0])
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in system.name + json.dumps(server.bodies)
    EndpointSystem(serve(server), "target", eos=(EOS,)).sample([1], PLAIN, [0])
    assert "Authorization" not in server.headers[1]
    for wrong in ("a\nb", "schlüssel"):
        with pytest.raises(OptionError, match="key"):
            EndpointSystem("http://localhost", "target", key=wrong)


# --- errors ------------------------------------------------------------------------------------


def fails(url, word, eos=(EOS,), **options):
    system = EndpointSystem(url, "target", eos=eos, **options)
    with pytest.raises(EndpointError, match=word) as caught:
        system.sample([1], PLAIN, range(40))
    assert "\n" not in str(caught.value)
    assert "/completions" in str(caught.value)


def test_no_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fails(f"http://127.0.0.1:{port}/v1", "does not answer.*start the server")
    fails("http://", "does not answer")


@pytest.mark.parametrize(
    ("status", "said", "word"),
    [
        (
            400,
            '{"error": {"message": "top_k\\nis unknown"}}',
            r"refused the request \(400\).*top_k",
        ),
        (500, "<html>\n<body>Server\nError", r"\(500\): <html> <body>Server Error"),
        (200, "not json", "does not answer"),
        (200, "", "does not answer"),
        (200, "[1]", "no JSON object"),
        (200, "{}", "without choices"),
        (200, '{"choices": []}', "without choices"),
        (200, '{"choices": {"text": "a"}}', "without choices"),
        (200, '{"choices": ["a"]}', "no objects"),
        (200, '{"choices": [{"text": "a"}]}', "no token ids"),
        (200, '{"choices": [{"text": "a", "token_ids": ["a"], "logprobs": 1}]}', "no token ids"),
        (200, '{"choices": [{"text": "a", "logprobs": {"tokens": ["a", "5"]}}]}', "no token ids"),
        (200, '{"choices": [{"text": "a", "logprobs": {"content": [{}, 1]}}]}', "no token ids"),
    ],
)
def test_answers_that_cannot_be_audited(status, said, word, serve):
    fails(serve(lambda body: (status, said)), word)


def test_a_server_without_ids(serve):
    fails(serve(Completions("text")), "return_token_ids")


def test_a_wrong_path(serve):
    fails(serve(Completions()) + "/v2", "404")


def test_a_server_that_does_not_answer_in_time(serve):
    over = threading.Event()

    def wait(body):
        over.wait()
        return 200, "{}"

    try:
        fails(serve(wait), "does not answer.*timed out", timeout=0.05)
    finally:
        over.set()


def test_which_end_was_left_out_must_be_known(serve):
    fails(serve(Completions()), "leaves out the EOS token", eos=(EOS, 5))
    system = EndpointSystem(serve(Completions(keeps_end=True)), "target", eos=(EOS, 5))
    assert any(text[-1] == EOS for text in system.sample([1], PLAIN, range(40)))


def test_ids_beyond_the_vocabulary(serve):
    choice = {"token_ids": [1, V], "finish_reason": "length"}
    with pytest.raises(EndpointError, match=f"vocabulary of {V}: is it the same checkpoint"):
        audit(serve(lambda body: (200, json.dumps({"choices": [choice] * 16}))))


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://localhost", "http://[::1", ""])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(OptionError, match="URL"):
        EndpointSystem(url, "target")
