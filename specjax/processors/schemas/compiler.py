"""JSON schemas as regular expressions: every text that matches is JSON and satisfies the schema.

Each keyword is enforced or refused by name. The expression may accept fewer texts than the schema: properties have the
order of the schema, there is at most one space between two parts, and additional properties are written only if the
schema has no `properties`. A `$ref` to itself is followed MAX_RECURSION times.

Guarantee: sound. Source: JSON Schema, draft 2020-12, with the names of drafts 4 to 7 for the same keywords.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from specjax.errors import UsageError
from specjax.processors.expressions import PatternError, any_of, repeat
from specjax.processors.schemas.integers import ANY_INTEGER, integer_range
from specjax.processors.schemas.strings import in_json_string

SPACE = "[ ]?"
CHARACTER = r'(?:[^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])'
FRACTION = r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
DEPTH = 2
"""Nesting of values that the schema does not restrict."""
MAX_RECURSION = 3
MAX_PARTS, MAX_PATTERN = 5000, 1 << 20
"""Most parts of a schema, those of references counted each time, and most characters of their expressions."""
MAX_CHAIN = 100
"""Most references one after another."""

_HOUR, _DAY = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]", "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = f"[0-9]{{3}}[1-9]-(?:0[1-9]|1[0-2])-{_DAY}"  # day 28 exists in every month
_TIME = rf"{_HOUR}(?:\.[0-9]{{1,6}})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[A-Za-z0-9_]+(?:[.+-][A-Za-z0-9_]+)*@[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*(?:\.[A-Za-z]{2,63})+",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uri": r"https?://[A-Za-z0-9]+(?:[.-][A-Za-z0-9]+)*(?::[1-9][0-9]{0,3})?(?:/[A-Za-z0-9._~-]*)*",
}
"""The supported formats. Each expression accepts a part of the format, without characters that JSON escapes."""

ANNOTATIONS = frozenset((
    "$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "discriminator", "nullable",
))  # fmt: skip
"""Keywords that do not restrict a value."""

KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "boolean": (),
    "null": (),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
}
"""The supported keywords of each type."""

DEPENDENT = {
    "additionalProperties": ("properties",), "items": ("prefixItems",), "additionalItems": ("items",),
}  # fmt: skip
"""Keywords that apply to what a neighbouring keyword does not list."""

FORMS: dict[str, type | tuple[type, ...]] = {
    "properties": Mapping, "required": list, "prefixItems": list, "type": (str, list), "format": str,
}  # fmt: skip
"""The Python types of keywords that are read before their values are checked."""

TYPES = ("object", "array", "string", "number", "boolean", "null")  # an integer is a number

Schema = Any  # a mapping or a boolean


def to_regex(schema: Schema) -> str:
    """Return an expression that the complete text must match.

    Raises: UsageError for an invalid schema, an unsupported keyword, or a schema that no text satisfies.
    """
    pattern = _Compiler(schema).compile(schema, "#", ())
    if pattern is None:
        raise UsageError("no text satisfies the JSON schema")
    return pattern


class _Compiler:
    """A compiler of the parts of one schema. None is the expression of a part that no text satisfies."""

    def __init__(self, root: Schema):
        self.root, self.num_parts, self.num_characters = root, 0, 0

    def compile(self, schema: Schema, path: str, trail: tuple[str, ...]) -> str | None:
        """Return the expression of a schema at `path`. `trail` has the references that were followed to it."""
        self.num_parts += 1
        pattern = self.part(schema, path, trail) if self.num_parts <= MAX_PARTS else ""
        self.num_characters = max(self.num_characters, len(pattern or ""))
        if self.num_parts > MAX_PARTS or self.num_characters > MAX_PATTERN:
            raise UsageError(f"the JSON schema is too large at {path}; use fewer parts, or fewer references")
        return pattern

    def part(self, schema: Schema, path: str, trail: tuple[str, ...]) -> str | None:
        if schema is False:
            return None
        if schema is True:
            return _anything(DEPTH)
        if not isinstance(schema, Mapping):
            _refuse(path, f"has {json.dumps(schema)} where a schema must stand")
        _check_forms(schema, path)
        schema = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
        if "allOf" in schema:
            schema = self.merge(schema, path)
        if "$ref" in schema:
            return self.reference(schema, path, trail)
        if "enum" in schema or "const" in schema:
            return _values(schema, path)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self.branches(schema, name, path, trail)
        if not schema:
            return _anything(DEPTH)
        types = _types(schema, path)
        _check_keywords(schema, {"type"} | {name for kind in types for name in KEYWORDS[kind]}, path)
        return _any_of([self.of_type(kind, schema, path, trail) for kind in types])

    def of_type(self, kind: str, schema: Mapping, path: str, trail: tuple[str, ...]) -> str | None:
        """Return the expression of the values of one type."""
        match kind:
            case "object":
                return self.object(schema, path, trail)
            case "array":
                return self.array(schema, path, trail)
            case "string":
                return _string(schema, path)
            case "boolean":
                return "(?:true|false)"
            case "null":
                return "null"
        return _number(schema, kind == "integer", path)

    def reference(self, schema: Mapping, path: str, trail: tuple[str, ...]) -> str | None:
        _check_keywords(schema, {"$ref"}, path)
        address = schema["$ref"]
        if trail.count(address) >= MAX_RECURSION:
            return None
        return self.compile(self.resolve(address, path), f"{path}/$ref", (*trail, address))

    def resolve(self, address: Any, path: str) -> Schema:
        if not isinstance(address, str) or not address.startswith("#"):
            _refuse(path, f"has the $ref {json.dumps(address)}; only references inside the schema are supported")
        part = self.root
        for name in filter(None, address[1:].split("/")):
            name = name.replace("~1", "/").replace("~0", "~")
            try:
                part = part[int(name)] if isinstance(part, list) else part[name]
            except (KeyError, ValueError, IndexError, TypeError):
                _refuse(path, f"has the $ref {address}, which does not exist")
        return part

    def follow(self, schema: Schema, path: str) -> Schema:
        """Return the schema that a chain of references leads to."""
        for _ in range(MAX_CHAIN):
            if not (isinstance(schema, Mapping) and "$ref" in schema and not set(schema) - {"$ref"} - ANNOTATIONS):
                return schema
            schema = self.resolve(schema["$ref"], path)
        _refuse(path, "has a $ref that leads back to itself")

    def merge(self, schema: Mapping, path: str) -> Mapping:
        """Return one schema for a schema with `allOf`, if its parts restrict different things."""
        parts: list[Mapping] = [{name: value for name, value in schema.items() if name != "allOf"}]
        for number, part in enumerate(_list_of(schema["allOf"], "allOf", path)):
            part = self.follow(part, path)
            if part is True:
                continue
            if not isinstance(part, Mapping):
                _refuse(path, f"has an allOf whose part {number} is not a mapping")
            _check_forms(part, path)
            parts.append(self.merge(part, path) if "allOf" in part else part)
        merged: dict[str, Any] = {}
        for part in parts:
            for name, value in part.items():
                if name in ANNOTATIONS or (name in merged and merged[name] == value):
                    continue
                if name not in merged:
                    merged[name] = value
                elif name == "properties" and not set(merged[name]) & set(value):
                    merged[name] = {**merged[name], **value}
                elif name == "required":
                    merged[name] = [*merged[name], *(one for one in value if one not in merged[name])]
                else:
                    _refuse(path, f"has an allOf whose parts both restrict {name}, which is not supported")
        for keyword, neighbours in DEPENDENT.items():  # it restricts what its own part does not list
            for part in parts:
                if keyword in part and any(part.get(name) != merged.get(name) for name in neighbours):
                    _refuse(path, f"has an allOf with {keyword} beside {neighbours[0]} of another part")
        return merged

    def branches(self, schema: Mapping, name: str, path: str, trail: tuple[str, ...]) -> str | None:
        """Return the expression of `anyOf` or `oneOf`, each branch with the other keywords of the schema."""
        other_keywords = {key: value for key, value in schema.items() if key != name}
        branches = _list_of(schema[name], name, path)
        if other_keywords:
            branches = [self.merge({**other_keywords, "allOf": [branch]}, path) for branch in branches]
        if name == "oneOf":
            self.check_disjoint(branches, path)
        return _any_of([self.compile(one, f"{path}/{name}/{i}", trail) for i, one in enumerate(branches)])

    def check_disjoint(self, branches: Sequence[Schema], path: str) -> None:
        """Refuse branches of `oneOf` of which two may accept one value: by types, values, or values of a property."""
        kinds = [self.signature(branch, path) for branch in branches]
        for number, (types, values, tags) in enumerate(kinds):
            for other_types, other_values, other_tags in kinds[:number]:
                if not types & other_types:
                    continue
                if values is not None and other_values is not None and not values & other_values:
                    continue
                if any(not tags[name] & other_tags[name] for name in tags.keys() & other_tags.keys()):
                    continue
                _refuse(path, "has a oneOf whose branches may accept the same value; use anyOf if that is acceptable")

    def signature(self, branch: Schema, path: str) -> tuple[set[str], set[str] | None, dict[str, set[str]]]:
        """Return the JSON types of a branch, its values if they are listed, and those of required properties."""
        branch = self.follow(branch, path)
        if not isinstance(branch, Mapping):
            return set(TYPES), None, {}
        _check_forms(branch, path)
        types = {"number" if kind == "integer" else kind for kind in _types(branch, path)}
        values = _listed(branch)
        if values is not None:
            types = {kind for kind in types if any(_has_type(json.loads(value), kind) for value in values)}
        properties = branch.get("properties", {})
        tags = {name: _listed(properties[name]) for name in branch.get("required", ()) if name in properties}
        if types != {"object"}:
            tags = {}
        return types, values, {name: listed for name, listed in tags.items() if listed is not None}

    def array(self, schema: Mapping, path: str, trail: tuple[str, ...]) -> str | None:
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(items, list):  # before draft 2020-12
            prefix, items = items, schema.get("additionalItems", True)
        counts = _counts(schema, "minItems", "maxItems", path)
        if counts is None:
            return None
        low, high = counts
        if schema.get("uniqueItems") and (high is None or high > 1):
            _refuse(path, "uses uniqueItems, which is not supported")
        prefix = prefix if high is None else prefix[:high]
        first = [self.compile(one, f"{path}/prefixItems/{i}", trail) for i, one in enumerate(prefix)]
        further = self.compile(items, f"{path}/items", trail)
        if None in first or (further is None and low > len(first)):
            return None
        if further is None or high == len(first):
            return _brackets(first)
        low, high = max(low - len(first), 0), None if high is None else high - len(first)
        if first:
            return _brackets([*first[:-1], f"{first[-1]}(?:,{SPACE}{further}){repeat(low, high)}"])
        more = f"{further}(?:,{SPACE}{further}){repeat(max(low - 1, 0), None if high is None else high - 1)}"
        return rf"\[{SPACE}(?:{more}){'?' if low == 0 else ''}{SPACE}\]"

    def object(self, schema: Mapping, path: str, trail: tuple[str, ...]) -> str | None:
        properties, required = dict(schema.get("properties", {})), list(schema.get("required", ()))
        more = schema.get("additionalProperties", True)
        counts = _counts(schema, "minProperties", "maxProperties", path)
        if counts is None:
            return None
        low, high = counts
        for name in required:
            properties.setdefault(name, more)
        if not properties:
            if low > 1:  # names could repeat, and an object counts each name once
                _refuse(path, "has minProperties above 1 for properties of any name, which is not supported")
            value = self.compile(more, f"{path}/additionalProperties", trail)
            return _map_of(value, low, high)
        if low > len(properties):
            _refuse(path, "has a minProperties above the number of its properties, which is not supported")
        if high is not None and high < len(required):
            return None
        optional = [name for name in properties if name not in required]
        optional = optional[: None if high is None else high - len(required)]
        required += optional[: max(low - len(required), 0)]
        parts: list[tuple[str, bool]] = []
        for name, value in properties.items():
            if name not in required and name not in optional:
                continue
            pattern = self.compile(value, f"{path}/properties/{name}", trail)
            if pattern is None:
                if name in required:
                    return None
                continue
            parts.append((f"{_literal(name)}{SPACE}:{SPACE}{pattern}", name in required))
        return rf"\{{{_members(parts)}{SPACE}\}}"


def _values(schema: Mapping, path: str) -> str | None:
    """Return the expression of the values of `enum` or `const`."""
    _check_keywords(schema, {"enum", "const", "type"}, path)
    values = _list_of(schema["enum"], "enum", path) if "enum" in schema else [schema["const"]]
    if "const" in schema:
        values = [value for value in values if _same(value, schema["const"])]
    types = _types(schema, path)
    allowed = [value for value in values if any(_has_type(value, kind) for kind in types)]
    return _any_of([_literal(value) for value in allowed])


def _string(schema: Mapping, path: str) -> str | None:
    """Return the expression of the strings of a schema."""
    lengths = [name for name in ("minLength", "maxLength") if name in schema]
    forms = [name for name in ("pattern", "format") if name in schema]
    if len(forms) + bool(lengths) > 1:
        _refuse(path, f"combines {' and '.join([*forms, *lengths])}, which is not supported; keep one of them")
    if "pattern" in schema:
        try:
            return f'"{in_json_string(schema["pattern"])}"'
        except PatternError as error:
            _refuse(path, f"has the pattern {json.dumps(schema['pattern'])}: {error}")
    if "format" in schema:
        if schema["format"] not in FORMATS:
            _refuse(path, f"has the format {json.dumps(schema['format'])}; supported are {', '.join(sorted(FORMATS))}")
        return f'"{FORMATS[schema["format"]]}"'
    counts = _counts(schema, "minLength", "maxLength", path)
    return None if counts is None else f'"{CHARACTER}{repeat(*counts)}"'


def _number(schema: Mapping, is_integer: bool, path: str) -> str | None:
    """Return the expression of the numbers or integers of a schema."""
    step = schema.get("multipleOf", 1 if is_integer else None)
    if step is not None and not (is_integer and step == 1):
        _refuse(path, "uses multipleOf, which is not supported")
    low, high = _bounds(schema, is_integer, path)
    if is_integer:
        return integer_range(low, high)
    if high is None and low is None:
        return ANY_INTEGER + FRACTION
    if high is None and low == 0:
        return ANY_INTEGER.removeprefix("-?") + FRACTION
    return _refuse(path, "restricts numbers by minimum or maximum; supported are integers, and minimum: 0")


def _members(parts: Sequence[tuple[str, bool]]) -> str:
    """Return the expression of properties in order, of which only the required ones must occur.

    A comma goes before each property after the first that is written. The first one is the first required property, or
    any optional one before it.
    """
    comma = f"{SPACE},{SPACE}"
    first_required = next((i for i, (_, is_required) in enumerate(parts) if is_required), None)
    tail = lambda i: "".join(
        f"{comma}{part}" if is_required else f"(?:{comma}{part})?" for part, is_required in parts[i:]
    )
    if first_required is not None:
        prefix = "".join(f"(?:{part}{comma})?" for part, _ in parts[:first_required])
        return f"{SPACE}{prefix}{parts[first_required][0]}{tail(first_required + 1)}"
    starts = [f"{part}{tail(i + 1)}" for i, (part, _) in enumerate(parts)]
    return f"(?:{SPACE}(?:{'|'.join(starts)}))?" if starts else ""


def _map_of(value: str | None, low: int, high: int | None) -> str | None:
    """Return the expression of an object with `low` to `high` properties of any name. `low` is 0 or 1."""
    if value is None or high == 0:
        return rf"\{{{SPACE}\}}" if low == 0 else None
    member = f'"{CHARACTER}*"{SPACE}:{SPACE}{value}'
    if low == 0:
        further = repeat(0, None if high is None else high - 1)
        member = f"(?:{member}(?:{SPACE},{SPACE}{member}){further})?"
    return rf"\{{{SPACE}{member}{SPACE}\}}"


def _brackets(items: Sequence[str | None]) -> str:
    return rf"\[{SPACE}{f',{SPACE}'.join(map(str, items))}{SPACE}\]"


def _anything(depth: int) -> str:
    """Return the expression of every JSON value with up to `depth` levels of arrays and objects."""
    parts = [f'"{CHARACTER}*"', ANY_INTEGER + FRACTION, "true", "false", "null"]
    if depth:
        value = _anything(depth - 1)
        parts += [rf"\[{SPACE}(?:{value}(?:,{SPACE}{value})*)?{SPACE}\]", str(_map_of(value, 0, None))]
    return f"(?:{'|'.join(parts)})"


def _any_of(parts: Sequence[str | None]) -> str | None:
    possible = [part for part in parts if part is not None]
    return any_of(possible) if possible else None


def _literal(value: Any) -> str:
    """Return the expression of one JSON value, as `json.dumps` writes it."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[][\\.*+?^$|(){}#&~-]", lambda match: "\\" + match[0], text)


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _listed(schema: Schema) -> set[str] | None:
    """Return the values of `enum` or `const` as JSON, or None for other schemas."""
    if not isinstance(schema, Mapping) or not ("const" in schema or isinstance(schema.get("enum"), list)):
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return {json.dumps(value, sort_keys=True) for value in values}


def _types(schema: Mapping, path: str) -> list[str]:
    """Return the types of a schema: those of `type`, else those whose keywords it has, else all."""
    if "type" not in schema:
        kinds = [kind for kind in TYPES if any(name in schema for name in KEYWORDS[kind])]
        return kinds or list(TYPES)
    kinds = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
    for kind in kinds:
        if kind not in KEYWORDS:
            _refuse(path, f"has the unknown type {json.dumps(kind)}")
    return [kind for kind in kinds if not (kind == "integer" and "number" in kinds)]


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and float(value).is_integer())
    kinds = {"string": str, "array": list, "object": dict}
    return kind in kinds and isinstance(value, kinds[kind])


def _check_forms(schema: Mapping, path: str) -> None:
    for name, form in FORMS.items():
        value = schema.get(name)
        names = value if name in ("required", "type") and isinstance(value, list) else ()
        if name in schema and not (isinstance(value, form) and all(isinstance(one, str) for one in names)):
            _refuse(path, f"has {name} {json.dumps(value)}, which is not of the right form")


def _check_keywords(schema: Mapping, allowed: set[str], path: str) -> None:
    unknown = [name for name in schema if name not in allowed]
    if unknown:
        _refuse(path, f"uses {', '.join(unknown)}, which is not supported here")


def _counts(schema: Mapping, low: str, high: str, path: str) -> tuple[int, int | None] | None:
    """Return the smallest and largest count, or None if there is none between them."""
    bounds = [schema.get(low, 0), schema.get(high)]
    for name, count in zip((low, high), bounds, strict=True):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int | float) or count != int(count)):
            _refuse(path, f"has {name} {json.dumps(count)}, which must be a whole number")
    smallest, largest = int(bounds[0]), None if bounds[1] is None else int(bounds[1])
    return None if largest is not None and largest < smallest else (max(smallest, 0), largest)


def _bounds(schema: Mapping, is_integer: bool, path: str) -> tuple[int | None, int | None]:
    """Return the smallest and largest allowed number. Exclusive bounds of integers become inclusive ones."""
    ends: list[int | None] = []
    for name, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        limits = []
        for keyword, step in ((name, 0), (exclusive, 1)):
            limit = schema.get(keyword)
            if limit is None or limit is False:
                continue
            if limit is True or isinstance(limit, bool) or not isinstance(limit, int | float):
                _refuse(path, f"has {keyword} {json.dumps(limit)}, which must be a number")
            if not is_integer:
                if step or limit != int(limit):
                    _refuse(path, f"restricts numbers by {keyword}; supported are integers, and minimum: 0")
                limits.append(int(limit))
                continue
            rounded = -int(-limit * sign // 1) * sign  # towards the allowed side
            limits.append(rounded + sign if step and rounded == limit else rounded)
        ends.append(None if not limits else max(limits) if sign == 1 else min(limits))
    return ends[0], ends[1]


def _list_of(value: Any, name: str, path: str) -> list:
    if not isinstance(value, list):
        _refuse(path, f"has {name} {json.dumps(value)}, which must be a list")
    return value


def _refuse(path: str, problem: str) -> NoReturn:
    raise UsageError(f"the JSON schema {problem} (at {path})")
