"""Any OpenAI-compatible completions endpoint under audit.

What is needed of it are token ids: prompts are sent as ids, and answers are read
from whichever field the server has for them: `token_ids` (vLLM, SGLang: asked for
by `return_token_ids`), `tokens` (llama.cpp), ids in the log-probabilities
(llama.cpp), or `token_id:N` there (vLLM: `return_tokens_as_token_ids`).
"""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from ..errors import EndpointError, OptionError, first_line
from ..types import SamplingParams

_REFUSED = (
    "no_repeat_ngram",
    "bad_words",
    "json_schema",
    "regex",
    "grammar",
    "transforms",
    "stop",
)
"""Parameters that servers call by different names, or do not have."""


class EndpointSystem:
    """A server's completions.

    Args:
        url: up to and with the version: "http://localhost:8000/v1".
        model: the name the server knows the target by.
        eos: ids that end a text; a single one is put back where a server leaves it out.
        together: samples that one request asks for (`n`). With 1 each has its seed; with
            more the server draws as it likes, since some draw n times the same of one seed.
        key: sent as a bearer token.
        timeout: seconds to wait for an answer.
    """

    takes_seeds = False

    def __init__(
        self,
        url: str,
        model: str,
        *,
        eos: Sequence[int] = (),
        together: int = 16,
        key: str | None = None,
        timeout: float = 120.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise OptionError(f"an endpoint is a URL like http://localhost:8000/v1, not {url!r}")
        self._url = url.rstrip("/") + "/completions"
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            if not key.isascii() or not key.isprintable():
                raise OptionError("the key of the endpoint has characters that no header takes")
            self._headers["Authorization"] = f"Bearer {key}"
        try:
            urllib.request.Request(self._url, b"", self._headers)
        except ValueError as error:
            raise OptionError(f"{url!r} is not a URL ({first_line(error)})") from error
        self._model, self._eos, self._together = model, tuple(eos), together
        self._timeout = timeout
        self.name = f"{model} at {url}"

    def sample(
        self, prompt: Sequence[int], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[int]]:
        ends = params.ends(self._eos)
        texts: list[list[int]] = []
        while len(texts) < len(seeds):
            body = self._body(prompt, params)
            if self._together == 1:
                body["seed"] = seeds[len(texts)]
            else:
                body["n"] = min(self._together, len(seeds) - len(texts))
            choices = self._post(body).get("choices")
            if not isinstance(choices, list) or not choices:
                raise EndpointError(
                    f"{self._url} answered without choices: is it a completions API?"
                )
            if not all(isinstance(choice, dict) for choice in choices):
                raise EndpointError(f"{self._url} answered with choices that are no objects")
            texts += [self._text(choice, params, ends) for choice in choices]
        return texts[: len(seeds)]

    def _body(self, prompt: Sequence[int], params: SamplingParams) -> dict[str, Any]:
        """Every parameter is sent, neutral ones as well: servers have defaults of their own."""
        check_sendable(params)
        ends = params.eos_token_ids
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": params.max_new_tokens,
            "temperature": float(params.temperature),
            "top_p": params.top_p,
            "top_k": -1 if params.top_k is None else params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": -1,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "logit_bias": {str(i): x for i, x in params.logit_bias} or None,
            "min_tokens": params.min_new_tokens,
            "ignore_eos": ends is not None,
            "stop_token_ids": list(ends) if ends else None,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "return_tokens": True,
        }

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            why = " ".join(error.read().decode(errors="replace")[:300].split())
            raise EndpointError(f"{self._url} refused the request ({error.code}): {why}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EndpointError(
                f"{self._url} does not answer ({first_line(error)}): start the server, or check "
                "the URL"
            ) from error
        if not isinstance(said, dict):
            raise EndpointError(f"{self._url} answered with no JSON object")
        return said

    def _text(
        self, choice: dict[str, Any], params: SamplingParams, ends: Sequence[int]
    ) -> list[int]:
        ids = _token_ids(choice)
        if ids is None:
            raise EndpointError(
                f"{self._url} gives no token ids: a law of tokens cannot be tested without; for "
                "vLLM and SGLang use a version with return_token_ids"
            )
        ended = choice.get("finish_reason") == "stop" and len(ids) < params.max_new_tokens
        if not ended or params.eos_token_ids == () or not set(ends).isdisjoint(ids):
            return ids
        if len(ends) != 1:
            raise EndpointError(
                f"{self._url} leaves out the EOS token, and the model has {len(ends)}: audit with "
                "one in eos_token_ids"
            )
        return [*ids, ends[0]]


def check_sendable(params: SamplingParams) -> None:
    """Whether an endpoint can be asked for such samples.

    Raises:
        OptionError: a parameter has no field that servers share.
    """
    given = params.given
    refused = [name for name in _REFUSED if name in given]
    if any(bias == -math.inf for _, bias in params.logit_bias):
        refused.append("a logit_bias of -inf")
    if refused:
        raise OptionError(f"{', '.join(refused)} cannot be sent to an endpoint: leave it out")


def _token_ids(choice: dict[str, Any]) -> list[int] | None:
    """Ids of a choice, wherever the server has put them."""
    for name in ("token_ids", "tokens"):
        if _ids(choice.get(name)):
            return list(choice[name])
    logprobs = choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, dict) else {}
    parts = logprobs.get("content")
    content: list[Any] = []
    if isinstance(parts, list):
        content = [part.get("id") for part in parts if isinstance(part, dict)]
    if _ids(content):
        return content
    said = logprobs.get("tokens")
    spelled = [str(t) for t in said] if isinstance(said, list) else []
    numbers = [t.removeprefix("token_id:") for t in spelled if t.startswith("token_id:")]
    if spelled and len(numbers) == len(spelled) and all(t.isdigit() for t in numbers):
        return [int(t) for t in numbers]
    return [] if choice.get("text") == "" else None


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, int) for i in value)
