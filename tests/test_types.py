"""Sampling parameters: what is refused says which field it is about; the rest becomes one form."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from outpace import OptionError, SamplingParams

INF, NAN = math.inf, math.nan

WRONG = {
    "temperature": [-1, NAN, INF, "1", None, True],
    "top_k": [0, 1.5, "1", True],
    "top_p": [0, 1.1, NAN, "1", None],
    "min_p": [-0.1, 1.1, NAN, INF, "0", None, True],
    "repetition_penalty": [0, -1, NAN, INF, "1", None, True],
    "presence_penalty": [NAN, INF, -INF, "0", None, True],
    "frequency_penalty": [NAN, INF, -INF, "0", None, True],
    "no_repeat_ngram": [0, -1, 1.5, "2", True],
    "logit_bias": [5, "ab", {"a": 1}, {-1: 1}, {1.5: 1}, {True: 1}, {1: "x"}, {1: NAN}, {1: INF}],
    "bad_words": [5.5, "", [""], [[]], [[1.5]], [[-1]], [None], [True], b"ab", {"a": 1}, "\udcff"],
    "min_new_tokens": [-1, 0.5, "1", None, True],
    "json_schema": ["{", "", 5, "5", [], {"a": {1}}],
    "regex": ["", 5, ["a"], True],
    "grammar": ["", 5, ["a"], True],
    "transforms": [5, [5], "abc", [None], {"a": 1}],
    "transform_draft": [None, 0, "no"],
    "logprobs": [-1, 0.5, "1", None, True],
    "max_new_tokens": [0, -1, 1.5, "x", None, True],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_what_is_wrong_is_named(name, value):
    with pytest.raises(OptionError, match=rf"^(a token id in )?{name}\b") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens=5 is more than"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar exclude each other"),
        ({"json_schema": True, "regex": "a"}, "json_schema and regex exclude each other"),
        ({"min_pp": 0.1}, "did you mean 'min_p'"),
    ],
)
def test_what_does_not_go_together_is_said(options, message):
    with pytest.raises(OptionError, match=message):
        SamplingParams.of(options)


def test_values_become_one_form():
    def double(ids, scores):
        return 2 * scores

    class Model:
        """What a pydantic model looks like from outside."""

        @staticmethod
        def model_json_schema():
            return {"type": "integer"}

    for field, given, kept in [
        ("logit_bias", {7: 1, 3: -INF}, ((3, -INF), (7, 1.0))),
        ("logit_bias", {np.int64(7): np.float32(0.5)}, ((7, 0.5),)),
        ("logit_bias", ((7, 1.0), (3, 2.0)), ((3, 2.0), (7, 1.0))),
        ("logit_bias", None, ()),
        ("bad_words", "ab", ("ab",)),
        ("bad_words", ["ab", [1, np.int64(2)], 3], ("ab", (1, 2), (3,))),
        ("bad_words", 3, ((3,),)),
        ("bad_words", torch.tensor([[1, 2]]), ((1, 2),)),
        ("bad_words", np.array([1, 2]), ((1,), (2,))),
        ("bad_words", None, ()),
        ("json_schema", {"type": "integer"}, '{"type": "integer"}'),
        ("json_schema", '{"type":\n"integer"}', '{"type": "integer"}'),
        ("json_schema", Model, '{"type": "integer"}'),
        ("json_schema", True, '{"type": "object"}'),
        ("json_schema", False, None),
        ("transforms", double, (double,)),
        ("transforms", [double], (double,)),
        ("transforms", None, ()),
        ("no_repeat_ngram", np.int64(2), 2),
        ("min_new_tokens", torch.tensor(2), 2),
        ("logprobs", np.uint8(2), 2),
    ]:
        params = SamplingParams(**{field: given})
        assert getattr(params, field) == kept
        assert type(getattr(params, field)) is type(kept)
        again = SamplingParams(**{field: getattr(params, field)})
        assert again == params
        assert hash(again) == hash(params)


def test_a_schema_keeps_its_order():
    """Properties come in the order in which the schema names them."""
    schema = {"properties": {"b": {}, "a": {}}, "type": "object"}
    kept = json.loads(SamplingParams(json_schema=schema).json_schema)
    assert list(kept["properties"]) == ["b", "a"]


def test_which_constraint_is_set():
    assert SamplingParams().constraint_fields == ()
    assert SamplingParams(regex="a").constraint_fields == ("regex",)
    assert SamplingParams(json_schema=True).constraint_fields == ("json_schema",)
    assert SamplingParams(grammar="start: x").constraint_fields == ("grammar",)
