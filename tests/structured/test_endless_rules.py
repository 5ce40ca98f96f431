"""Grammars that derive no text are refused before anything is sampled; those that derive one are not."""

from __future__ import annotations

import pytest

from deepinfer.structured.endless_rules import require_text
from deepinfer.structured.failures import INVALID_SCHEMA
from deepinfer.structured.problems import SchemaError
from deepinfer.structured.spec import Ebnf
from deepinfer.structured.worker_process import Compiled, Refused, WorkerSettings, compile_one
from tests.structured.support import vocabulary

NO_TEXT = {
    "itself": ("root ::= root", "root"),
    "itself behind a character": ('root ::= "a" root', "root"),
    "itself in every alternative": ('root ::= "a" root | "b" root "c"', "root"),
    "a circle": ('root ::= "x" a\na ::= "y" b\nb ::= "z" a', "root, a, b"),
    "a part that never ends": ('root ::= "a" x "b"\nx ::= x\ny ::= "c"', "root, x"),
    "at least one of what never ends": ('root ::= x+\nx ::= "a" x', "root, x"),
    "two of what never ends": ("root ::= x{2,5}\nx ::= x", "root, x"),
    "an empty class": ('root ::= "a" []', "root"),
    "a class that leaves nothing": ("root ::= [^\\u0000-\\U0010ffff]", "root"),
}
SOME_TEXT = [
    'root ::= ""',
    "root ::= ()",
    'root ::= "a"{0}',
    'root ::= "a" root | ""',
    'root ::= root "b" | "a"',
    'root ::= x* "a"\nx ::= x',
    'root ::= x{0,3} "a"\nx ::= "a" x',
    'root ::= [] | "a"',
    'root ::= "a" | "b" x\nx ::= "c" x',
    'root ::= "a"\nx ::= x',
    'root ::= a\na ::= "(" b ")"\nb ::= a | [^a-z]',
    'root ::= "a" (="b")',
    'root ::= TagDispatch(("<t>", x), loop_after_dispatch=false)\nx ::= x',
    "root ::= Token(5) ExcludeToken(3)",
]


@pytest.mark.parametrize("name", NO_TEXT)
def test_a_grammar_without_any_text_is_refused_with_the_rules_that_never_end(name: str) -> None:
    grammar, endless = NO_TEXT[name]
    with pytest.raises(SchemaError, match="no text fits it") as caught:
        require_text(grammar, "root")
    assert caught.value.why.endswith(f": {endless}")
    assert "alternative that ends" in caught.value.fix


@pytest.mark.parametrize("grammar", SOME_TEXT)
def test_a_grammar_with_some_text_is_taken(grammar: str) -> None:
    require_text(grammar, "root")  # raises where there is none
    assert isinstance(compile_one(Ebnf(grammar).grammar_key, vocabulary().info, _settings()), Compiled)


def test_another_start_rule_is_what_counts() -> None:
    require_text('root ::= root\nstart ::= "a"', "start")
    with pytest.raises(SchemaError):
        require_text('root ::= "a"\nstart ::= start', "start")


def test_many_rules_take_linear_time() -> None:
    last = 10_000
    chain = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(last))
    require_text(f'{chain}r{last} ::= "a"', "root")
    with pytest.raises(SchemaError, match=r"root, r0, r1, r2, r3, \.\.\."):
        require_text(f"{chain}r{last} ::= r0", "root")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [('root ::= "a" root', "no text fits it"), ("root ::= Token(2)", "none of the model's tokens can begin")],
)
def test_a_worker_refuses_what_comes_to_nothing(grammar: str, said: str) -> None:
    """Id 2 is the tokenizer's padding, which no mask allows: only the masks can tell that nothing is left."""
    reply = compile_one(Ebnf(grammar).grammar_key, vocabulary().info, _settings())
    assert isinstance(reply, Refused)
    assert reply.kind == INVALID_SCHEMA
    assert said in reply.message


def test_the_empty_text_alone_is_a_language() -> None:
    assert isinstance(compile_one(Ebnf('root ::= ""').grammar_key, vocabulary().info, _settings()), Compiled)


@pytest.mark.parametrize("grammar", ['größe ::= "x"\nroot ::= größe', 'root ::= "x" | ä'])
def test_a_rule_name_that_the_library_cannot_read_is_no_crash(grammar: str) -> None:
    reply = compile_one(Ebnf(grammar).grammar_key, vocabulary().info, _settings())
    assert isinstance(reply, Refused)
    assert reply.kind == INVALID_SCHEMA
    assert "can't be compiled" in reply.message


def _settings() -> WorkerSettings:
    return WorkerSettings(
        token_bytes=vocabulary().token_bytes,
        eos_id=vocabulary().eos_id,
        num_threads=1,
        cpu_seconds=20,
        memory_bytes=4 << 30,
        max_grammar_bytes=1 << 20,
        max_compiled_bytes=1 << 20,
        max_mask_s=0.5,
    )
