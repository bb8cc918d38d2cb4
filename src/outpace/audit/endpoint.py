"""Any OpenAI-compatible completions endpoint under audit.

What is needed of it are token ids: prompts are sent as ids, and answers are read
from whichever field the server has for them: `token_ids` (vLLM, SGLang: asked for
by `return_token_ids`), `tokens` (llama.cpp), ids in the log-probabilities
(llama.cpp), or `token_id:N` there (vLLM: `return_tokens_as_token_ids`).
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from ..errors import EndpointError, OptionError, first_line
from ..types import SamplingParams

_REFUSED = ("no_repeat_ngram", "bad_words", "json_schema", "regex", "grammar", "transforms")
"""Parameters that servers call by different names, or do not have."""


class EndpointSystem:
    """A server's completions.

    Args:
        url: up to and with the version: "http://localhost:8000/v1".
        model: the name the server knows the target by.
        eos: ids that end a text; one is put back where a server leaves it out.
        together: samples that one request asks for (`n`); 1 for servers without.
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
        self._model, self._eos, self._together = model, tuple(eos), together
        self._key, self._timeout = key, timeout
        self.name = f"{model} at {url}"

    def sample(
        self, prompt: Sequence[int], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[int]]:
        ends = self._eos if params.eos_token_ids is None else params.eos_token_ids
        texts: list[list[int]] = []
        while len(texts) < len(seeds):
            body = self._body(prompt, params, seeds[len(texts)])
            body["n"] = min(self._together, len(seeds) - len(texts))
            choices = self._post(body).get("choices")
            if not isinstance(choices, list) or not choices:
                raise EndpointError(
                    f"{self._url} answered without choices: is it a completions API?"
                )
            texts += [self._text(choice, params, ends) for choice in choices]
        return texts[: len(seeds)]

    def _body(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> dict[str, Any]:
        plain = SamplingParams()
        refused = [n for n in _REFUSED if getattr(params, n) != getattr(plain, n)]
        if refused:
            raise OptionError(f"{', '.join(refused)} cannot be sent to an endpoint: leave it out")
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": params.max_new_tokens,
            "temperature": float(params.temperature),
            "seed": seed,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "return_tokens": True,
        }
        names = {
            "top_p": "top_p",
            "top_k": "top_k",
            "min_p": "min_p",
            "repetition_penalty": "repetition_penalty",
            "presence_penalty": "presence_penalty",
            "frequency_penalty": "frequency_penalty",
            "min_new_tokens": "min_tokens",
        }
        for ours, theirs in names.items():
            if getattr(params, ours) != getattr(plain, ours):
                body[theirs] = getattr(params, ours)
        if params.logit_bias:
            body["logit_bias"] = {str(i): x for i, x in params.logit_bias}
        if params.eos_token_ids is not None:
            body["ignore_eos" if not params.eos_token_ids else "stop_token_ids"] = (
                list(params.eos_token_ids) or True
            )
        return body

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            why = error.read().decode(errors="replace")[:300]
            raise EndpointError(f"{self._url} refused the request ({error.code}): {why}") from error
        except (OSError, ValueError) as error:
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
        if ended and len(ends) == 1 and ends[0] not in ids:
            ids = [*ids, ends[0]]
        return ids


def _token_ids(choice: dict[str, Any]) -> list[int] | None:
    """Ids of a choice, wherever the server has put them."""
    for name in ("token_ids", "tokens"):
        if _ids(choice.get(name)):
            return list(choice[name])
    logprobs = choice.get("logprobs") or {}
    content = [part.get("id") for part in logprobs.get("content") or []]
    if _ids(content):
        return content
    spelled = [str(t).removeprefix("token_id:") for t in logprobs.get("tokens") or []]
    if spelled and all(t.isdigit() for t in spelled) and "token_id:" in logprobs["tokens"][0]:
        return [int(t) for t in spelled]
    return [] if choice.get("text") == "" else None


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, int) for i in value)
