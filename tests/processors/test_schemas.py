"""JSON schemas: every text of an automaton is JSON that a validator accepts. Other keywords are refused by name."""

import json
import re

import numpy as np
import pytest
from processed import accepts

from specjax import UsageError, processors
from specjax.processors import schemas

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("outlines_core")

EOS = 256


class Bytes:
    """A token for each byte, and one that ends a text."""

    eos = (EOS,)

    def spellings(self):
        return [*(bytes([byte]) for byte in range(256)), None]


def texts_of(automaton, count=40, longest=60):
    """Random texts of an automaton. After `longest` bytes they take the shortest way to an end."""
    classes = automaton.classes.tolist()
    edges = [
        [(token, row[number]) for token, number in enumerate(classes) if number >= 0 and row[number] >= 0]
        for row in automaton.following.tolist()
    ]
    distance = np.where(automaton.accepting, 0, len(edges))
    for _ in edges:
        reached = [min([distance[s], *(distance[to] + 1 for _, to in row)]) for s, row in enumerate(edges)]
        if (np.array(reached) == distance).all():
            break
        distance = np.array(reached)
    rng, texts = np.random.default_rng(0), []
    for _ in range(count):
        state, text = 0, bytearray()
        while not (automaton.accepting[state] and (len(text) >= longest or not edges[state] or rng.random() < 0.3)):
            options = edges[state]
            if len(text) >= longest:
                options = [min(options, key=lambda edge: distance[edge[1]])]
            # Choose the following state first: most bytes are content of strings.
            targets = sorted({to for _, to in options})
            target = targets[rng.integers(len(targets))]
            tokens = [token for token, to in options if to == target]
            text.append(tokens[rng.integers(len(tokens))])
            state = target
        texts.append(text.decode())
    return texts


def thing(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


ENFORCED = {
    "quote in a key": thing(**{'a"b': {"type": "null"}}),
    "backslash in a key": thing(**{"a\\b": {"type": "null"}}),
    "signs in a key": thing(**{"a.*[^$]{2}|(é)#&~-": {"type": "boolean"}}),
    "pattern of any characters": {"type": "string", "pattern": "^.{2}$"},
    "pattern with alternatives": {"type": "string", "pattern": "^a|b$"},
    "pattern with a quote": {"type": "string", "pattern": '^[a"]{2}$'},
    "pattern with a space": {"type": "string", "pattern": "^a\\sb$"},
    "pattern with a backslash": {"type": "string", "pattern": "^\\\\+$"},
    "pattern without anchors": {"type": "string", "pattern": "[0-9]{3}"},
    "pattern with a complement": {"type": "string", "pattern": "^[^a-z]\\D\\W$"},
    "pattern with anchors in groups": {"type": "string", "pattern": "^(?:a|b)$|^(c|d+$)"},
    "pattern of control characters": {"type": "string", "pattern": "^[\\x00-\\x1f]{2}$"},
    "allOf of objects": {"allOf": [thing(a={"type": "null"}), thing(b={"type": "null"})]},
    "allOf of a reference": {"$defs": {"x": {"minLength": 2}}, "allOf": [{"$ref": "#/$defs/x"}, {"type": "string"}]},
    **{f"format {name}": {"type": "string", "format": name} for name in schemas.FORMATS},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "integers": {"type": "integer", "minimum": -12, "exclusiveMaximum": 230},
    "integers from a fraction": {"type": "integer", "minimum": 2.5},
    "numbers": {"type": "number", "minimum": 0},
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    "prefix": {"prefixItems": [{"type": "null"}, {"const": 1}], "items": {"type": "boolean"}, "minItems": 3},
    "prefix that is cut": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "null"}], "maxItems": 1},
    "no items": {"type": "array", "items": False},
    "optional properties": {"properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}},
    "some required": {"properties": {x: {"type": "null"} for x in "abcd"}, "required": ["b", "d"]},
    "required without a schema": {"type": "object", "required": ["a"]},
    "properties counted": {"properties": {x: {"type": "null"} for x in "abcd"}, "minProperties": 2, "maxProperties": 3},
    "any names": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    "nothing else": {**thing(a={"type": "null"}), "additionalProperties": False},
    "enum with a type": {"enum": ["a", 1, None, 2.5, '"', [1, {"x": None}]], "type": ["string", "integer", "array"]},
    "const": {"const": 'a"\\\n\u2028'},
    "anyOf beside a type": {"type": "string", "anyOf": [{"minLength": 3}, {"const": ""}]},
    "oneOf of types": {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
    "oneOf of tags": {"oneOf": [thing(kind={"const": "a"}, x={"type": "null"}), thing(kind={"enum": ["b"]})]},
    "types": {"type": ["boolean", "null"]},
    "anything": {},
    "true": True,
    "recursion": {
        "$defs": {"tree": {"properties": {"left": {"$ref": "#/$defs/tree"}, "n": {"type": "null"}}, "required": ["n"]}},
        "$ref": "#/$defs/tree",
    },
    "impossible option": {"properties": {"a": False, "b": {"type": "null"}}},
}


@pytest.mark.parametrize("name", ENFORCED)
def test_texts_are_json_that_satisfies_the_schema(name):
    schema = ENFORCED[name]
    texts = texts_of(processors.json_schema(schema, Bytes()))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for text in texts:
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (thing(a={"type": "integer"}, b={"type": "string"}), [{"a": -3, "b": 'é "x" \\'}]),
        ({"properties": {x: {"type": "null"} for x in "abc"}}, [{}, {"a": None}, {"b": None, "c": None}]),
        (
            {"properties": {x: {"type": "null"} for x in "abc"}, "required": ["b"]},
            [{"b": None}, {"a": None, "b": None}],
        ),
        ({"type": "string", "pattern": "b"}, ["b", "abc", 'a"b', "\\b"]),
        ({"type": "array", "items": {"type": "number"}}, [[], [1], [1.5, -2e3, 0]]),
        ({}, [{"a": [1, "b", None]}, [[], {}], None, 1.5e-7]),
        ({"type": "string", "format": "date-time"}, ["2026-11-28T06:34:44Z"]),
    ],
)
def test_texts_of_json_dumps_are_accepted(schema, values):
    automaton = processors.json_schema(schema, Bytes())
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        assert accepts(automaton, text.encode()), value
        assert not accepts(automaton, f"{text[:-1]}!".encode())


REFUSED = [
    *((name, {name: value}) for name, value in (
        ("not", {}), ("if", {}), ("contains", {}), ("patternProperties", {}), ("propertyNames", {}),
        ("dependentRequired", {}), ("unevaluatedProperties", False), ("unknown", 1),
    )),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("multipleOf", {"type": "integer", "multipleOf": 3}),
    ("minimum", {"type": "number", "minimum": 1}),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}),
    ("format", {"type": "string", "format": "idn-hostname"}),
    ("pattern and minLength", {"type": "string", "pattern": "a", "minLength": 2}),
    ("look-around", {"type": "string", "pattern": "(?=a)b"}),
    ("back-reference", {"type": "string", "pattern": "(a)\\1"}),
    ("word boundary", {"type": "string", "pattern": "\\bfoo"}),
    ("flags", {"type": "string", "pattern": "(?i)foo"}),
    ("both restrict minLength", {"allOf": [{"minLength": 1}, {"minLength": 2}]}),
    ("additionalProperties beside properties", {
        "allOf": [{**thing(a={}), "additionalProperties": False}, thing(b={})],
    }),
    ("oneOf whose branches", {"oneOf": [{"minLength": 1}, {"type": "string"}]}),
    ("oneOf whose branches", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ("not exist", {"$ref": "#/$defs/x"}),
    ("only references inside", {"$ref": "https://example.org/x"}),
    ("leads back", {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"$ref": "#/$defs/x"}}}),
    ("unknown type", {"type": "text"}),
    ("whole number", {"type": "string", "minLength": "2"}),
    ("must be a list", {"enum": "ab"}),
    *(("not of the right form", {name: value}) for name, value in (
        ("properties", []), ("required", "a"), ("required", [1]), ("type", 3), ("type", [{}]), ("format", []),
        ("prefixItems", {}),
    )),
    ("not of the right form", {"allOf": [{"minLength": 1}, {"properties": []}]}),
    ("not of the right form", {"oneOf": [{"type": "null"}, {"type": {}}]}),
    ("a schema must stand", {"type": "array", "items": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "schema"), REFUSED)
def test_what_is_not_enforced_is_refused_by_name(name, schema):
    with pytest.raises(UsageError, match=re.escape(name)) as error:
        schemas.to_regex(thing(a=schema) if "$ref" not in json.dumps(schema) else schema)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        False, {"enum": []}, {"type": "string", "minLength": 2, "maxLength": 1}, thing(a=False), {"$ref": "#"},
        {"const": 1, "type": "string"}, {"type": "integer", "minimum": 3, "maximum": 2}, 
        {"required": ["a"], "additionalProperties": False, "type": "object"},
    ],
)  # fmt: skip
def test_a_schema_that_no_text_satisfies(schema):
    with pytest.raises(UsageError, match="no text satisfies the JSON schema"):
        schemas.to_regex(schema)
