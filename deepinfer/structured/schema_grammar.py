"""JSON Schema to a grammar whose texts are exactly spellings of the values that the schema allows.

What is fixed, as it says nothing about the value: members come in the order of ``properties``, with free keys last;
numbers have no leading zeros (with bounds: no exponent either); strings under ``pattern`` or ``format``, keys and
``enum`` values are spelled in one way; whitespace follows the layout. The one addition: with ``is_strict`` an object
that lists ``properties`` (an array that lists ``prefixItems``) has no others unless the schema speaks of them.
"""

from __future__ import annotations

from decimal import Decimal

from deepinfer.structured.json_keywords import TYPES, check_keywords
from deepinfer.structured.json_strings import (
    FREE_STRING,
    STRING_RULES,
    key_other_than,
    quoted,
    spell_in_json,
    string_of_length,
)
from deepinfer.structured.json_text import Json, identity, kind_of, to_text
from deepinfer.structured.number_terms import ANY_NUMBER, Bounds, integer_term, multiples_term, number_term
from deepinfer.structured.problems import SchemaError, UnsatisfiableError
from deepinfer.structured.regex_parser import regex_term
from deepinfer.structured.schema_disjoint import are_disjoint
from deepinfer.structured.schema_members import MemberRules, Property
from deepinfer.structured.schema_merge import SchemaMerger, type_names
from deepinfer.structured.string_formats import FORMATS
from deepinfer.structured.terms import EMPTY, NOTHING, Literal, Repeat, Rule, Term, choice, optional, repeat, sequence
from deepinfer.structured.text_tree import choice_of_texts
from deepinfer.structured.whitespace import LAYOUTS, Layout

MAX_RULES = 50_000
ANY = "json_any"
_CONSTANTS = {"null": Literal("null"), "boolean": choice([Literal("true"), Literal("false")])}


def json_rules(schema: Json, whitespace: str = "bounded", is_strict: bool = True) -> dict[str, Term]:
    """The rules of a schema's grammar; it starts at ``root``.

    Raises:
        SchemaError: a keyword that cannot be enforced (its path is named), or a schema that no value fits.
    """
    check_keywords(schema)
    builder = SchemaGrammar(schema, LAYOUTS[whitespace], is_strict)
    builder.rules["root"] = builder.value(schema, "$")
    return builder.rules


class SchemaGrammar:
    """Builds rules, one for each distinct subschema.

    Args:
        root: a schema whose keywords were checked.
    """

    def __init__(self, root: Json, layout: Layout, is_strict: bool) -> None:
        self.layout = layout
        self.is_strict = is_strict
        self.merger = SchemaMerger(root)
        self.rules: dict[str, Term] = dict(STRING_RULES)
        self._rule_of: dict[str, str] = {}
        self._add_any()

    def add(self, rules: dict[str, Term]) -> None:
        self.rules.update(rules)
        if len(self.rules) > MAX_RULES:
            why = f"its grammar has more than {MAX_RULES} rules"
            raise SchemaError("schema", len(self.rules), why=why, fix="describe less, or lower its limits")

    def _add_any(self) -> None:
        """Any JSON value."""
        members = self._list_of(sequence(Rule(FREE_STRING), self.layout.colon, Rule(ANY)), 0, None)
        alternatives = [
            sequence(Literal("{"), self._enclosed(members, "}")),
            sequence(Literal("["), self._enclosed(self._list_of(Rule(ANY), 0, None), "]")),
            Rule(FREE_STRING),
            ANY_NUMBER,
            *_CONSTANTS.values(),
        ]
        self.rules[ANY] = choice(alternatives)

    def _enclosed(self, content: Term, close: str) -> Term:
        """``content`` and a closing bracket; without blanks where there is no content."""
        empty = [Literal(close)] if _may_be_empty(content) else []
        return choice([*empty, sequence(self.layout.gap, _not_empty(content), self.layout.gap, Literal(close))])

    def _list_of(self, item: Term, low: int, high: int | None) -> Term:
        """``low`` to ``high`` items with commas between them."""
        if high is not None and (high < low or high == 0):
            return NOTHING if high < low else EMPTY
        following = sequence(self.layout.comma, item)
        some = sequence(item, repeat(following, max(0, low - 1), None if high is None else high - 1))
        return some if low else optional(some)

    def value(self, schema: Json, path: str) -> Term:
        """The rule of a subschema.

        Raises:
            UnsatisfiableError: no value fits it.
        """
        if schema is True:
            return Rule(ANY)
        if schema is False:
            raise UnsatisfiableError(path, False, "no value fits the schema false")
        flat = self.merger.flatten(schema, path)
        if isinstance(flat, bool):
            return self.value(flat, path)
        if not flat:
            return Rule(ANY)
        key = to_text(flat)
        name = self._rule_of.get(key)
        if name is None:
            name = self._rule_of[key] = f"value_{len(self._rule_of)}"
            self.add({name: NOTHING})  # stands in while the rule refers to itself
            try:
                self.rules[name] = self._flat_value(flat, path)
            except UnsatisfiableError:
                del self._rule_of[key]
                raise
        return Rule(name)

    def _flat_value(self, schema: dict[str, Json], path: str) -> Term:
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._alternatives(schema, keyword, path)
        if "enum" in schema or "const" in schema:
            return self._listed(schema, path)
        kinds = type_names(schema.get("type", list(TYPES)))
        if "number" in kinds:
            kinds = [kind for kind in kinds if kind != "integer"]
        found, problem = [], None
        for kind in kinds:
            try:
                found.append(self._of_kind(kind, schema, path))
            except UnsatisfiableError as error:
                problem = error
        if not found:
            raise problem or UnsatisfiableError(path, schema, "no type is left")
        return choice(found)

    def _alternatives(self, schema: dict[str, Json], keyword: str, path: str) -> Term:
        rest = {key: value for key, value in schema.items() if key != keyword}
        branches, problem = [], None
        for index, branch in enumerate(schema[keyword]):
            try:
                flat = self.merger.flatten(branch, f"{path}.{keyword}[{index}]")
                branches.append(self.merger.merge(rest, flat, f"{path}.{keyword}[{index}]") if rest else flat)
            except UnsatisfiableError as error:
                problem = error
        if keyword == "oneOf":
            self._require_disjoint(branches, path)
        terms = []
        for index, branch in enumerate(branches):
            try:
                terms.append(self.value(branch, f"{path}.{keyword}[{index}]"))
            except UnsatisfiableError as error:
                problem = error
        if not terms:
            assert problem is not None, f"{path} has no alternatives"
            raise problem
        return choice(terms)

    def _require_disjoint(self, branches: list[Json], path: str) -> None:
        for index, branch in enumerate(branches):
            for other in range(index):
                if not are_disjoint(self.merger, branch, branches[other]):
                    raise SchemaError(
                        f"{path}.oneOf",
                        f"alternatives {other} and {index}",
                        why="a value might fit both, and oneOf allows one only",
                        fix="use anyOf, give them different types, or require a property with different const values",
                    )

    def _listed(self, schema: dict[str, Json], path: str) -> Term:
        """``enum`` and ``const``."""
        others = sorted(set(schema) - {"enum", "const", "type"})
        if others:
            why = f"it stands beside {', '.join(others)}, which says something about the listed values"
            raise SchemaError(f"{path}.{others[0]}", schema[others[0]], why=why, fix="list the values that fit")
        values = schema.get("enum", [schema.get("const")])
        if "const" in schema:
            values = [value for value in values if identity(value) == identity(schema["const"])]
        kinds = set(type_names(schema.get("type", list(TYPES))))
        kinds |= {"integer"} if "number" in kinds else set()
        values = [value for value in values if kind_of(value) in kinds]
        if not values:
            raise UnsatisfiableError(path, schema, "no listed value is of the type")
        scalars = [value for value in values if not isinstance(value, (dict, list))]
        containers = [self._spelled(value) for value in values if isinstance(value, (dict, list))]
        return choice([*([choice_of_texts(map(to_text, scalars))] if scalars else []), *containers])

    def _spelled(self, value: Json) -> Term:
        """One value."""
        if isinstance(value, dict):
            return self._container(
                "{}", [sequence(Literal(to_text(k)), self.layout.colon, self._spelled(v)) for k, v in value.items()]
            )
        if isinstance(value, list):
            return self._container("[]", [self._spelled(inner) for inner in value])
        return Literal(to_text(value))

    def _container(self, brackets: str, parts: list[Term]) -> Term:
        if not parts:
            return Literal(brackets)
        separated = [part for item in parts for part in (self.layout.comma, item)][1:]
        gap = self.layout.gap
        return sequence(Literal(brackets[0]), gap, *separated, gap, Literal(brackets[1]))

    def _of_kind(self, kind: str, schema: dict[str, Json], path: str) -> Term:
        """The values of one type."""
        match kind:
            case "string":
                term = self._string(schema, path)
            case "integer" | "number":
                term = self._number(kind, schema, path)
            case "array":
                term = self._array(schema, path)
            case "object":
                term = self._object(schema, path)
            case _:
                term = _CONSTANTS[kind]
        if term == NOTHING:
            raise UnsatisfiableError(path, schema, f"no {kind} fits")
        return term

    def _string(self, schema: dict[str, Json], path: str) -> Term:
        exact = [key for key in ("pattern", "format") if key in schema]
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if not exact:
            if (low, high) == (0, None):
                return Rule(FREE_STRING)
            name = f"string_{low}_{high}"
            if high is not None and low > high:
                return NOTHING
            self.add(string_of_length(low, high, name))
            return Rule(name)
        lengths = [key for key in ("minLength", "maxLength") if schema.get(key)]
        if len(exact + lengths) > 1:
            clashing = (exact + lengths)[1]
            why = f"it can't be enforced together with {exact[0]}"
            raise SchemaError(f"{path}.{clashing}", schema[clashing], why=why, fix="say both in one pattern")
        if high == 0:
            raise SchemaError(
                f"{path}.maxLength", 0, why=f"it can't be enforced together with {exact[0]}", fix="use const"
            )
        keyword = exact[0]
        pattern = schema[keyword] if keyword == "pattern" else FORMATS[schema[keyword]]
        return quoted(regex_term(pattern, f"{path}.{keyword}", is_search=keyword == "pattern", spell=spell_in_json))

    def _number(self, kind: str, schema: dict[str, Json], path: str) -> Term:
        bounds = _bounds(schema)
        factor = schema.get("multipleOf", 1 if kind == "integer" else None)
        if factor is None:
            return number_term(bounds)
        if factor == 1:
            return integer_term(bounds)
        if not bounds.is_free:
            why = "it can't be enforced together with bounds"
            raise SchemaError(f"{path}.multipleOf", factor, why=why, fix="drop the bounds, or list the values in enum")
        name = f"multiple_of_{factor}"
        self.add(multiples_term(int(factor), name))
        return Rule(name)

    def _array(self, schema: dict[str, Json], path: str) -> Term:
        prefix = schema.get("prefixItems", [])
        items = schema.get("items", not (self.is_strict and prefix))
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        starts: list[Term] = []
        for index, each in enumerate(prefix[: len(prefix) if high is None else high]):
            try:
                starts.append(self.value(each, f"{path}.prefixItems[{index}]"))
            except UnsatisfiableError:  # the array ends before this place
                high = index
                break
        try:
            item = self.value(items, f"{path}.items") if high is None or high > len(starts) else NOTHING
        except UnsatisfiableError:
            item = NOTHING
        num = len(starts)
        rest_high = None if high is None else max(0, high - num)
        # What may follow the first ``num`` items, then what may follow fewer, from the back to the front.
        content = repeat(sequence(self.layout.comma, item), max(0, low - num), rest_high)
        if not starts:
            content = self._list_of(item, low, rest_high) if item != NOTHING else EMPTY if not low else NOTHING
        for index in range(num - 1, -1, -1):
            whole = sequence(*([self.layout.comma] if index else []), starts[index], content)
            content = whole if low > index else optional(whole) if whole != NOTHING else EMPTY
        if content == NOTHING or (high is not None and low > high):
            raise UnsatisfiableError(path, schema, "no number of items fits")
        return sequence(Literal("["), self._enclosed(content, "]"))

    def _object(self, schema: dict[str, Json], path: str) -> Term:
        listed = schema.get("properties", {})
        required = schema.get("required", [])
        others = schema.get("additionalProperties", not (self.is_strict and "properties" in schema))
        implied = others if "additionalProperties" in schema else True
        properties = []
        for name in [*listed, *(name for name in dict.fromkeys(required) if name not in listed)]:
            place = f"{path}.properties.{name}"
            is_required = name in required
            try:
                term = self.value(listed.get(name, implied), place)
            except UnsatisfiableError:
                if is_required:
                    raise
                term = NOTHING
            key = sequence(Literal(to_text(name)), self.layout.colon)
            properties.append(Property(name, sequence(key, term), is_required))
        extra = None
        number = len(self.rules)
        if others is not False:
            try:
                value = self.value(others, f"{path}.additionalProperties")
                self.add(key_other_than([each.name for each in properties], f"key_{number}"))
                extra = sequence(Rule(f"key_{number}"), self.layout.colon, value)
            except UnsatisfiableError:
                extra = None
        members = MemberRules(f"members_{number}", tuple(properties), extra, self.layout)
        self.add(members.build(schema.get("minProperties", 0), schema.get("maxProperties"), path))
        return sequence(Literal("{"), Rule(members.start))


def _bounds(schema: dict[str, Json]) -> Bounds:
    """The four keywords as one range; where two bounds are equal the excluding one is the tighter."""
    lows = [(Decimal(schema[key]), key != "minimum") for key in ("minimum", "exclusiveMinimum") if key in schema]
    highs = [(-Decimal(schema[key]), key != "maximum") for key in ("maximum", "exclusiveMaximum") if key in schema]
    low, excludes_low = max(lows, default=(None, False))
    high, excludes_high = max(highs, default=(None, False))
    return Bounds(low, None if high is None else -high, excludes_low, excludes_high)


def _may_be_empty(content: Term) -> bool:
    return content == EMPTY or (isinstance(content, Repeat) and content.low == 0)


def _not_empty(content: Term) -> Term:
    """``content`` without the empty text, for contents that :func:`_may_be_empty` knows."""
    if content == EMPTY:
        return NOTHING
    if isinstance(content, Repeat) and content.low == 0:
        assert content.high == 1, "an optional list"
        return content.term
    return content
