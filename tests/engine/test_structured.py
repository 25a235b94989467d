"""Structured output below HTTP: grammars, masks, and an engine's sequences under pressure."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoengine.async_engine import AsyncEngine
from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.errors import EngineOverloadedError, InvalidRequestError
from nanoengine.llm import LLM
from nanoengine.protocol import Refused
from nanoengine.sampling.params import SamplingParams
from nanoengine.structured import compiler as compiler_module
from nanoengine.structured import constraints as constraints_module
from nanoengine.structured import masks
from nanoengine.structured import trial as trial_module
from nanoengine.structured.compiler import Compiler
from nanoengine.structured.constraints import Constraints
from nanoengine.structured.gate import Gate
from nanoengine.structured.grammar import Grammar
from nanoengine.structured.matcher import GrammarError, Tokens, matcher, source
from nanoengine.structured.trial import Trial
from nanoengine.text.tokenizer import Tokenizer
from tests.engine.structured_cases import PADDING, random_schema, rooted, write_tiny_llm
from tests.engine.trained_tokenizers import BACKENDS, trained

DATE = Grammar("regex", r"\d{4}-\d{2}-\d{2}")


def compiler(kind: str = "byte_level", num_tokens: int | None = None) -> Compiler:
    tokenizer = trained(kind)
    return Compiler(lambda: tokenizer, num_tokens or tokenizer.vocab_size, tokenizer.eos_token_ids)


@pytest.fixture(scope="module")
def byte_level() -> Compiler:
    return compiler()


def constraints_for(tokenizer: Tokenizer, threads: int = 1) -> Constraints:
    size = tokenizer.vocab_size
    return Constraints(size, tokenizer.eos_token_ids, lambda: masks.empty(32, size), threads=threads)


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


class Walk:
    """One constrained sequence, without a model."""

    def __init__(self, compile: Compiler, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._constraints = constraints_for(tokenizer)
        self._constraints.add(0, params, compile(params).result(30))

    def allowed(self) -> list[int]:
        mask = self._constraints.masks(np.zeros(1, np.int64))
        return np.flatnonzero(masks.allowed(mask, self._tokenizer.vocab_size)[0]).tolist()

    def take(self, token: int) -> bool:
        self.tokens.append(token)
        return not self._constraints.advance([0], [token])

    def to_the_end(self, rng: random.Random, most: int = 500) -> str | None:
        """A random answer; ends where it may, half of the time. None: it came to a dead end."""
        eos = self._tokenizer.eos_token_ids[0]
        for _ in range(most):
            allowed = self.allowed()
            assert allowed, "nothing may come"
            token = eos if eos in allowed and (len(allowed) == 1 or rng.random() < 0.5) else rng.choice(allowed)
            if not self.take(token):
                return None
            if token == eos:
                return self._tokenizer.decode(self.tokens)
        pytest.fail(f"no end: {self._tokenizer.decode(self.tokens)!r}")


def walk(compile: Compiler, kind: str, rng: random.Random, grammar: Grammar, **params: Any) -> str:
    answer = Walk(compile, SamplingParams(structured=grammar, **params), trained(kind)).to_the_end(rng)
    assert answer is not None
    return answer


# -- grammars --------------------------------------------------------------------------------------------------------

CHOICES = ["yes", "no (really?)", 'a"b\\c\n', "né"]
CASES: dict[str, tuple[Grammar, str]] = {
    "regex": (DATE, r"\d{4}-\d{2}-\d{2}"),
    "anchored": (Grammar("regex", r"^a(b|c\$)$"), r"a(b|c\$)"),
    "not anchored": (Grammar("regex", r"a\$"), r"a\$"),
    "choice": (Grammar("choice", json.dumps(CHOICES)), "|".join(map(re.escape, CHOICES))),
    "lark": (Grammar("grammar", 'start: A B?\nA: "x"\nB: /[0-9]+/'), r"x\d*"),
    "gbnf": (Grammar("grammar", 'root ::= "a" item+\nitem ::= "b" | "é"'), "a[bé]+"),
    "a special token is spelled": (Grammar("choice", '["<|im_end|>"]'), re.escape("<|im_end|>")),
    "special tokens are spelled": (Grammar("choice", '["<|im_end|>", "</s>"]'), re.escape("<|im_end|>") + "|</s>"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BACKENDS)
def test_every_tokenizer_follows_every_kind_of_grammar(kind: str) -> None:
    compile, rng, tokenizer = compiler(kind), random.Random(0), trained(kind)
    for name, (grammar, pattern) in CASES.items():
        if name == "a special token is spelled" and kind == "unigram":
            continue  # which has no tokens for it
        for _ in range(5):
            one = Walk(compile, SamplingParams(structured=grammar), tokenizer)
            if one.to_the_end(rng) is None:
                assert kind == "unigram", "only there are characters that no token has"
                continue
            # As an answer's tokens are decoded: after a prompt, so that the first one keeps its space.
            text = tokenizer.decoder(tokenizer.encode("x")).push(one.tokens, final=True)
            assert re.fullmatch(pattern, text), (name, text)
            assert not set(one.tokens[:-1]) & tokenizer.special_ids, "a special token is no text"


def test_only_the_end_is_left_of_a_complete_answer(byte_level: Compiler) -> None:
    tokenizer = trained("byte_level")
    one = Walk(byte_level, SamplingParams(structured=Grammar("choice", '["a"]')), tokenizer)
    assert one.take(*tokenizer.encode("a", add_special_tokens=False))
    assert one.allowed() == list(tokenizer.eos_token_ids)


def test_a_schema_cannot_make_itself_lenient(byte_level: Compiler) -> None:
    lenient = {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}
    with pytest.raises(GrammarError, match="uniqueItems"):
        byte_level(SamplingParams(structured=schema(lenient))).result(30)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (schema({"properties": {"a": 7}}), "schema must be an object or boolean"),
        (schema({"properties": {"a": {"type": "string", "pattern": "^(["}}}), "unclosed"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema({"type": "string", "pattern": "[a&&b]"}), "two ways"),
        (schema({"type": "yaml"}), "yaml"),
        (schema({"$ref": "#/$defs/none"}), "none"),
        (schema({"$ref": "http://example.org/x"}), "example.org"),
        (schema({"$ref": "#"}), "no text matches"),
        (schema(False), "Unsatisfiable"),
        (schema({"type": "string", "format": "unheard-of"}), "unheard-of"),
        (schema({"type": "integer", "multipleOf": 999983}), "too large"),
        (schema({"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}), "less than 1 apart"),
        (schema({"type": "integer", "minimum": 0, "exclusiveMinimum": True}), "draft 4"),
        (schema({"type": "integer", "multipleOf": -3}), "greater than 0"),
        (schema({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}), "too large"),
        *((schema({word: value}), word) for word, value in {
            "not": {"type": "string"}, "if": {}, "contains": {}, "uniqueItems": True, "propertyNames": {"maxLength": 1},
            "dependentRequired": {"a": ["b"]}, "dependentSchemas": {}, "unevaluatedProperties": False,
            "unevaluatedItems": False, "minContains": 2, "$dynamicRef": "#a",
        }.items()),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (Grammar("regex", "(["), "unclosed"),
        (Grammar("grammar", "start: ("), ""),
        (Grammar("grammar", "start: nothing"), "nothing"),
        (Grammar("grammar", "root ::= (" * 3000), ""),
        (Grammar("grammar", "start: start"), "no text matches"),
        *((Grammar("grammar", f"start: a\na: %json {text}"), message) for text, message in {
            '{"x-guidance": {"lenient": true}, "type": "array", "uniqueItems": true}': "uniqueItems",
            '{"type": "integer", "multipleOf": 999983} "x"': "has a schema that is too large",
            '{"type": "integer", "minimum": 0, "exclusiveMinimum": true}': "draft 4",
            "[1]": "has a schema that must be an object", '{"a"': "is not valid", '{"items":' * 5000: "is not valid",
        }.items()),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_time(byte_level: Compiler, grammar: Grammar, message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(GrammarError) as refused:
        byte_level(SamplingParams(structured=grammar)).result(30)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 600
    assert time.monotonic() - begin < 10


def chain(length: int, link: Callable[[Any], Any]) -> dict[str, Any]:
    links = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(length)}
    return links | {str(length): {"const": 1}}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("grammar", "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(4500)) + 'a4500: "x"\n'),
        Grammar("grammar", "start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(4500)) + 'A4500: "x"\n'),
        schema({"$ref": "#/$defs/0", "$defs": chain(6000, lambda next: next)}),
        schema({"$ref": "#/$defs/0", "$defs": chain(3000, lambda next: {"properties": {"x": next}})}),
    ],
)
def test_long_chains_of_rules_do_not_overflow_a_stack(byte_level: Compiler, grammar: Grammar) -> None:
    """An overflow would end the process, and with it every request: this test would not fail, but be the last."""
    assert Walk(byte_level, SamplingParams(structured=grammar), trained("byte_level")).allowed()


def test_a_schema_within_a_grammar_is_what_it_is_without(byte_level: Compiler) -> None:
    """Also where the same words stand in a string, a regular expression or a comment before it."""
    pattern, rng = r'^[^\\"]{1,3}$', random.Random(4)
    closed = {"type": "object", "required": ["a"], "additionalProperties": False}
    value = json.dumps(closed | {"properties": {"a": {"type": "string", "pattern": pattern}}})
    text = f'start: HEAD "%json {{}}" a  // %json {{\n# %json {{\nHEAD: /\\/"%json [{{]/\na: %json {value} "."\n'
    for _ in range(100):
        answer = walk(byte_level, "byte_level", rng, Grammar("grammar", text))
        head, tail = '/"%json {%json {}', "."
        assert answer.startswith(head)
        assert answer.endswith(tail)
        body = answer[len(head) : -len(tail)]
        assert re.search(pattern, json.loads(body)["a"]), body
        assert not re.search(r"\s{42}", body), "space without end"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("yaml", "a"), ("json_schema", ""), ("json_schema", "{"), ("json_schema", "[]"), ("json_schema", "3"),
        ("json_schema", '{"items":' * 80 + "{}" + "}" * 80), ("json_schema", "[" * 100_000),
        ("json_schema", " " * (1 << 18) + "{}"), ("json_object", "{}"), ("regex", ""), ("grammar", ""),
        ("regex", "\ud800"), ("choice", "[]"), ("choice", '["a", 1]'), ("choice", '[""]'), ("choice", '["\\ud800"]'),
        ("choice", json.dumps(["x"] * 5000)), ("grammar", " " * (1 << 17)),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_where_it_comes_in(kind: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        Grammar(kind, text, "response_format.json_schema.schema")
    assert refused.value.param == "response_format"
    assert refused.value.message.startswith("response_format.json_schema.schema: ")


@pytest.mark.parametrize("pattern", ['^[^"]{1,3}$', r"^[^\\]{1,3}$", r'^[^\\"a-z]{1,3}$', r"^[^\n\"]{1,3}$"])
def test_a_class_leaves_out_what_json_has_to_escape(byte_level: Compiler, pattern: str) -> None:
    rng = random.Random(1)
    for _ in range(100):
        value = json.loads(walk(byte_level, "byte_level", rng, schema({"type": "string", "pattern": pattern})))
        assert re.search(pattern, value), value


def test_a_schema_about_schemas_keeps_its_words(byte_level: Compiler) -> None:
    """``pattern`` and ``multipleOf`` are also names of properties, and may stand in data."""
    fixed = {"pattern": "[^a]", "multipleOf": 999983, "uniqueItems": False}
    properties = {"pattern": {"const": fixed}, "multipleOf": {"enum": [fixed]}}
    asked = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    answer = json.loads(walk(byte_level, "byte_level", random.Random(2), schema(asked)))
    assert answer == {"pattern": fixed, "multipleOf": fixed}


def test_equal_grammars_are_compiled_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "CACHE_ENTRIES", 3)
    compile = compiler()

    def ask(text: str) -> Any:
        return compile(SamplingParams(structured=Grammar("regex", text), temperature=0.5))

    first = ask("a")
    assert ask("a") is first
    ask("b"), ask("c"), ask("a"), ask("d")
    assert ask("a") is first, "the one used last stays"
    second = ask("b")
    assert second.result(30).matchers
    assert len(compile._cache) == 3
    monkeypatch.setattr(compiler_module, "CACHE_TEXT", 10)
    ask("x" * 8)
    assert sum(len(grammar.text) for grammar, _ in compile._cache if grammar) <= 10


def test_a_grammar_that_comes_again_gets_matchers_of_its_own_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "APART", 3)
    compile, tokenizer = compiler(), trained("byte_level")
    params = SamplingParams(structured=schema({"type": "object", "properties": {"a": {"type": "integer"}}}))
    for _ in range(6):
        compiled = compile(params).result(30)
        compile._pool.submit(lambda: None).result(30)
    compile._pool.shutdown()
    assert len(compiled.matchers) == 3
    constraints = constraints_for(tokenizer, threads=2)
    for key in range(20):
        assert constraints.add(key, params, compiled) is None
    keys, rng = np.arange(20), random.Random(0)
    for _ in range(8):
        rows = constraints.masks(keys)
        assert (rows == rows[0]).all()
        token = rng.choice(np.flatnonzero(masks.allowed(rows[:1], tokenizer.vocab_size)[0]).tolist())
        assert not constraints.advance(keys.tolist(), [token] * 20)


# -- bad words, allowed tokens ---------------------------------------------------------------------------------------


def test_bad_words_are_not_completed() -> None:
    compile, tokenizer, rng = compiler(), trained("byte_level"), random.Random(3)
    words = ("hello", "quick brown", "the")
    params = SamplingParams(bad_words=words, structured=Grammar("regex", "(hello|quick brown|the| |x)+"))
    bad = {ids for word in words for ids in compile(params).result(30).bad_words}
    assert any(len(ids) > 1 for ids in bad)
    assert any(len(ids) == 1 for ids in bad)
    for _ in range(200):
        one = Walk(compile, params, tokenizer)
        for _ in range(12):
            if not (allowed := one.allowed()) or not one.take(rng.choice(allowed)):
                break
        sequences = {tuple(one.tokens[i : i + n]) for n in map(len, bad) for i in range(len(one.tokens))}
        assert not sequences & bad


def test_allowed_tokens_and_grammar_meet() -> None:
    compile, tokenizer = compiler(), trained("byte_level")
    a, b, c = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc")
    one = Walk(compile, SamplingParams(allowed_token_ids=(a, b), structured=Grammar("choice", '["a", "c"]')), tokenizer)
    assert one.allowed() == [a]
    assert c not in Walk(compile, SamplingParams(allowed_token_ids=(a, b)), tokenizer).allowed()


# -- an engine under pressure ----------------------------------------------------------------------------------------


def synthetic(depth: int, compiler: Compiler | None = None, **settings: Any) -> Engine:
    limits = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32} | settings
    engine = Engine(EngineConfig.model_validate({"model": "synthetic", "synthetic": {"step_seconds": 0}} | limits))
    engine._runner.depth = depth
    if compiler is not None:
        engine._gate = Gate(compiler)
    return engine


def run(
    engine: Engine, requests: dict[int, tuple[str, SamplingParams, int, int | None]]
) -> dict[int, tuple[list[int], str]]:
    """(output, how it ended) of requests, by key: (prompt, parameters, step of arrival, step of its abort)."""
    outputs: dict[int, tuple[list[int], str]] = {key: ([], "") for key in requests}
    step = 0
    while step < 25 or engine.has_work:
        for key, (prompt, params, arrives, aborted) in requests.items():
            if arrives == step:
                engine.add(key, np.frombuffer(prompt.encode(), np.uint8).astype(np.int32), params)
            if aborted == step:
                engine.abort(key)
        output = engine.step()
        engine.check()
        step += 1
        assert step < 20_000
        if output is None:
            continue
        for key, token in zip(output.keys.tolist(), output.tokens.tolist(), strict=True):
            outputs[key][0].append(token)
        for end in output.finished:
            outputs[end.key] = (outputs[end.key][0], end.reason)
        for key, error in output.refused:
            outputs[key] = (outputs[key][0], str(error))
    assert not len(engine._constraints), "a constraint was left behind"
    assert not engine._gate
    return outputs


GRAMMARS = [
    None, DATE, Grammar("choice", '["yes", "no", "it may be so"]'), Grammar("regex", "(ab|c)+"), Grammar("regex", "x*"),
    schema({"type": "object", "properties": {"a": {"enum": [1, 22]}}, "additionalProperties": False}),
    Grammar("grammar", 'start: ("a" | "b"){1,30}'),
]  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> dict[int, tuple[str, SamplingParams, int, int | None]]:
    found = {}
    for key in range(draw(st.integers(1, 7))):
        prompt = "same prompt "[: draw(st.integers(0, 12))] + draw(st.text("ab", min_size=1, max_size=4))
        max_tokens = draw(st.integers(1, 40))
        params = SamplingParams(
            structured=draw(st.sampled_from(GRAMMARS)),
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=tuple(draw(st.lists(st.sampled_from(b"abcx12"), max_size=1))),
            bad_words=tuple(draw(st.lists(st.sampled_from(["ab", "yes", "c"]), max_size=1))),
            allowed_token_ids=tuple(draw(st.sampled_from([(), (), tuple(range(32, 128)), tuple(b"abc xyz")]))),
        )
        aborted = draw(st.none() | st.none() | st.integers(0, 20))
        found[key] = (prompt, params, draw(st.integers(0, 10)), aborted)
    return found


@pytest.fixture(scope="module")
def shared() -> Compiler:
    """For engines that come and go by the hundred: one has processes of its own."""
    return synthetic(0)._gate._compiler


@given(workload=requests(), depth=st.sampled_from([0, 1]), num_blocks=st.integers(15, 40))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_are_those_of_each_request_alone(
    shared: Compiler, workload: dict[int, tuple[str, SamplingParams, int, int | None]], depth: int, num_blocks: int
) -> None:
    """Whatever runs beside it, is in flight, or is preempted: the stand-in's tokens depend on all that a row reads."""
    together = run(synthetic(depth, shared, num_blocks=num_blocks, watermark=0.0), workload)
    for key, (prompt, params, _, aborted) in workload.items():
        alone = run(synthetic(0, shared), {key: (prompt, params, 0, None)})[key]
        output, ended = together[key]
        if aborted is not None and not ended:
            assert output == alone[0][: len(output)]
            continue
        assert (output, ended) == alone
        complete = ended == "stop"
        stopped_by = output[-1] if complete else None
        if params.structured is not None and complete and stopped_by not in params.stop_token_ids:
            assert stopped_by in (257, 259), "only an end of sequence ends a grammar's answer"
            check_text(params.structured, bytes(output[:-1]).decode())
        if params.structured is None and params.ignore_eos:
            assert (
                ended != "stop" or stopped_by in params.stop_token_ids or params.allowed_token_ids or params.bad_words
            )


def check_text(grammar: Grammar, text: str) -> None:
    match grammar.kind:
        case "regex":
            assert re.fullmatch(grammar.text, text), text
        case "choice":
            assert text in json.loads(grammar.text)
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(grammar.text))
        case "grammar":
            assert re.fullmatch("[ab]{1,30}", text), text


def test_preemptions_happen_in_such_workloads() -> None:
    engine = synthetic(1, num_blocks=20, watermark=0.0)
    grammar = Grammar("regex", "[a-z]{60}")
    workload = {i: (f"p{i}", SamplingParams(structured=grammar, max_tokens=70), 0, None) for i in range(4)}
    outputs = run(engine, workload)
    assert engine.load().preemptions > 0
    for output, ended in outputs.values():
        assert ended == "stop"
        assert re.fullmatch("[a-z]{60}", bytes(output[:-1]).decode())


def test_a_slow_grammar_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = synthetic(0)
    real, ready = compiler_module.matcher, []

    def slow(*args: Any) -> Any:
        while not ready:
            time.sleep(0.001)
        return real(*args)

    monkeypatch.setattr(compiler_module, "matcher", slow)
    prompt = np.array([65], np.int32)
    engine.add(0, prompt, SamplingParams(structured=DATE))
    engine.add(1, prompt, SamplingParams(max_tokens=5))
    assert engine.load().waiting == 2
    finished: list[int] = []
    while 1 not in finished:
        if (output := engine.step()) is not None:
            finished += [end.key for end in output.finished]
    assert 0 not in finished
    assert engine.has_work
    ready.append(True)
    while 0 not in finished:
        if (output := engine.step()) is not None:
            finished += [end.key for end in output.finished]


LONG = (
    Grammar("regex", "a?" * 30_000),  # quadratic time and memory
    Grammar("grammar", f"start: /{'a?' * 30_000}/"),
)


def test_what_would_take_for_ever_is_ended_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is lost to them: more of them than threads, and still there is an answer for who comes after."""
    monkeypatch.setattr(trial_module, "SECONDS", 1.0)
    engine = synthetic(0)
    memory = psutil.Process().memory_info().rss
    asked = {i: ("a", SamplingParams(structured=LONG[i % 2], bad_words=(str(i),)), 0, None) for i in range(4)}
    asked[4] = ("a", SamplingParams(structured=DATE), 0, None)
    ended = run(engine, asked)
    for i in range(4):
        assert ended[i][0] == []
        assert re.search("takes longer than 1 s|takes too much memory", ended[i][1])
    assert ended[4][1] == "stop"
    assert psutil.Process().memory_info().rss - memory < 300 << 20


def test_a_grammar_that_nobody_waits_for_any_more_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "SECONDS", 1.0)
    engine, prompt = synthetic(0), np.array([65], np.int32)
    for key in range(100):
        engine.add(key, prompt, SamplingParams(structured=LONG[1], bad_words=(f"a{key}",)))
    wanted = SamplingParams(structured=Grammar("regex", "abc"))
    for key in (100, 101):
        engine.add(key, prompt, wanted)
    for key in range(101):
        engine.abort(key)
    begin = time.monotonic()
    while engine.has_work:
        engine.step()
    assert time.monotonic() - begin < 30, "as long as the two take that had begun"
    assert engine.load().finished == {"stop": 1, "length": 0, "abort": 101}
    engine.add(102, prompt, SamplingParams(structured=LONG[1], bad_words=("a50",)))
    while (output := engine.step()) is None or not output.refused:
        pass
    assert "takes longer" in str(output.refused[0][1]), "what was not begun is begun when it is asked for again"


def test_who_does_not_get_a_turn_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "SECONDS", 1.0)
    monkeypatch.setattr("nanoengine.structured.gate.TURN_SECONDS", 0.2)
    engine = synthetic(0)
    for key in range(5):
        bomb = SamplingParams(structured=LONG[1], bad_words=(f"a{key}",))
        engine.add(key, np.array([65], np.int32), bomb)
    refused: dict[int, Any] = {}
    while engine.has_work:
        if (output := engine.step()) is not None:
            refused |= dict(output.refused)
    assert [type(refused[key]) for key in range(2)] == [InvalidRequestError] * 2
    assert [type(refused[key]) for key in range(2, 5)] == [EngineOverloadedError] * 3
    for error in refused.values():
        again = Refused.of(1, error).error()
        assert (type(again), str(again)) == (type(error), str(error))


def test_a_trial_that_was_ended_by_another_is_begun_again(byte_level: Compiler) -> None:
    tokenizer = trained("byte_level")
    tokens = Tokens([tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)], [], tokenizer.eos_token_ids)
    trial = Trial(tokens, list(tokenizer.eos_token_ids))
    assert trial(DATE)
    assert trial._process is not None
    trial._process.kill()
    trial._process.wait()
    assert trial(DATE)
    with pytest.raises(GrammarError, match="unclosed"):
        trial(Grammar("regex", "(["))


def test_a_text_that_is_forced_again_and_again_is_tokenised_once() -> None:
    tokenizer = trained("byte_level")
    asked = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return tokenizer.encode(text, add_special_tokens=False)

    tokens = Tokens(
        [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)], [], tokenizer.eos_token_ids, encode
    )
    first = matcher(source(Grammar("regex", "(yes)?hello there")), tokens)
    assert first.consume_tokens([tokens(letter)[0] for letter in "yes"])
    found = [first.deep_copy().compute_bitmask() for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert len([text for text in asked if text.endswith("hello there")]) == 1
    long = "x" * 1000
    assert tokens(long) == tokens(long)
    assert asked.count(long) == 2, "long ones are not kept"


def test_an_answer_that_cannot_go_on_is_an_error_and_not_an_answer() -> None:
    params = SamplingParams(structured=Grammar("choice", '["ab"]'), allowed_token_ids=tuple(b"a"))
    ((_, ended),) = run(synthetic(1), {0: ("p", params, 0, None)}).values()
    assert ended.startswith("structured_outputs: the answer came to a point")


# -- a real model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny_llm(tmp_path_factory.mktemp("tiny"))
    return LLM(str(folder), dtype="float32", device="cpu", num_threads=1, cpu_kv_cache_bytes=64 << 20, max_num_seqs=32)


def answers(llm: LLM, schemas: list[dict[str, Any]], seed: int) -> list[Any]:
    params = [
        SamplingParams(structured=schema(one), temperature=1, seed=seed + i, max_tokens=1500)
        for i, one in enumerate(schemas)
    ]
    return llm.generate(["JSON: "] * len(params), params, use_tqdm=False)


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.soak)])
def test_random_schemas_are_kept_at_temperature_1(tiny: LLM, count: int) -> None:
    rng = random.Random(count)
    schemas = [rooted(random_schema(rng)) for _ in range(count)]
    for asked, answer in zip(schemas, answers(tiny, schemas, 0), strict=True):
        assert answer.finish_reason == "stop", (asked, answer.text)
        jsonschema.validate(json.loads(answer.text), asked)


def test_a_constrained_answer_is_the_same_alone_and_in_a_batch(tiny: LLM) -> None:
    rng = random.Random(5)
    schemas = [rooted(random_schema(rng)) for _ in range(8)]
    together = answers(tiny, schemas, 7)
    alone = [answers(tiny, [one], 7 + i)[0] for i, one in enumerate(schemas)]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]


def test_a_step_in_flight_changes_nothing(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a row's forward pass is launched before its mask is known, among rows that have none."""
    params = [
        SamplingParams(structured=g, seed=i, max_tokens=30, logprobs=i % 3 or None, presence_penalty=i % 2)
        for i, g in enumerate(GRAMMARS * 2)
    ]
    expected = tiny.generate(["a b"] * len(params), params, use_tqdm=False)
    monkeypatch.setattr(tiny.engine._runner, "depth", 1)
    found = tiny.generate(["a b"] * len(params), params, use_tqdm=False)
    assert [(a.token_ids, a.logprobs) for a in found] == [(a.token_ids, a.logprobs) for a in expected]


def test_padding_is_never_sampled(tiny: LLM) -> None:
    size = tiny.tokenizer.vocab_size
    assert tiny.engine.info.vocab_size == size + PADDING
    params = SamplingParams(temperature=100, ignore_eos=True, max_tokens=400, seed=1, logprobs=20)
    (answer,) = tiny.generate(["x"], params, use_tqdm=False)
    assert max(answer.token_ids) < size
    assert all(token < size for entry in answer.logprobs or () for token, _ in entry.top)
    (penalised,) = tiny.generate([[size]], SamplingParams(repetition_penalty=2, max_tokens=5), use_tqdm=False)
    assert len(penalised.token_ids) <= 5, "a prompt may hold an id of the padding"
    for field in ({"logit_bias": {size: 1.0}}, {"allowed_token_ids": [size]}):
        with pytest.raises(InvalidRequestError) as refused:
            tiny.generate(["x"], SamplingParams(**field), use_tqdm=False)  # type: ignore[arg-type]
        assert refused.value.param in field


def test_logit_bias_bans_forces_and_leaves_neighbours_alone(tiny: LLM) -> None:
    def greedy(**settings: Any) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, **settings)

    (plain,) = tiny.generate(["A B C"], greedy(), use_tqdm=False)
    first = plain.token_ids[0]
    other = (first + 1) % tiny.tokenizer.vocab_size
    batch = [
        greedy(logit_bias={first: -100}),
        greedy(),
        greedy(logit_bias={other: 100}),
        greedy(allowed_token_ids=[9, 8]),
    ]
    banned, neighbour, forced, allowed = tiny.generate(["A B C"] * 4, batch, use_tqdm=False)
    assert first not in banned.token_ids
    assert neighbour.token_ids == plain.token_ids
    assert forced.token_ids == [other] * 6
    assert set(allowed.token_ids) <= {8, 9}
    for answer in (banned, forced, allowed):
        assert answer.logprobs is not None
        assert answer.logprobs[0].top == plain.logprobs[0].top, "log-probabilities are of the raw distribution"
        assert all(-1000 < entry.logprob <= 0 for entry in answer.logprobs)


async def test_a_process_of_its_own_refuses_a_grammar_and_lives_on() -> None:
    engine = AsyncEngine(EngineConfig.model_validate({"model": "synthetic", "synthetic": {"step_seconds": 0}}))
    await engine.start()
    try:
        with pytest.raises(InvalidRequestError) as refused:
            async for _ in engine.generate([65], SamplingParams(structured=Grammar("regex", "([", "guided_regex"))):
                pass
        assert refused.value.param == "guided_regex"
        text = ""
        async for delta in engine.generate([65], SamplingParams(structured=DATE, max_tokens=20)):
            text += delta.text
        assert re.fullmatch(DATE.text, text)
        assert delta.finish_reason == "stop"
    finally:
        await engine.stop()


def test_masks_are_the_same_one_after_the_other_and_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are those who come to a dead end; sequences come and go, in an order of their own each step."""
    monkeypatch.setattr(compiler_module, "APART", 3)
    monkeypatch.setattr(constraints_module, "_TRIED", 2)
    monkeypatch.setattr(constraints_module, "_DEAR_S", 0.0)
    compile, tokenizer, rng = compiler(), trained("byte_level"), random.Random(0)
    eos, size = tokenizer.eos_token_ids[0], tokenizer.vocab_size
    kinds = [constraints_for(tokenizer, threads) for threads in (1, 2, 3)]
    keys: list[int] = []
    stuck = set()
    for turn in range(60):
        if len(keys) < 24:
            key, g = turn, [DATE, None, Grammar("regex", "(ab|c)+"), Grammar("regex", "[a-z]{9}")][rng.randrange(4)]
            params = SamplingParams(
                structured=g, bad_words=("1",) if turn % 2 else (), ignore_eos=turn % 3 == 0, max_tokens=50
            )
            compiled = compile(params).result(30)
            assert not any(one.add(key, params, compiled) for one in kinds)
            keys.append(key)
        rng.shuffle(keys)
        step = [*keys[: rng.randint(0, len(keys))], 1000]
        rows, *others = [one.masks(np.array(step)).copy() for one in kinds]
        assert all((rows == other).all() for other in others)
        assert (rows[-1] == -1).all(), "who is not known may sample anything"
        # An end too early, and a token that a grammar does not have, are what a row with nothing left samples.
        tokens = [
            rng.choice([eos, rng.randrange(size)])
            if rng.random() < 0.05
            else rng.choice(np.flatnonzero(masks.allowed(row, size)).tolist() or [eos])
            for row in rows
        ]
        first, *rest = [sorted((key, str(error)) for key, error in one.advance(step, tokens)) for one in kinds]
        assert all(first == found for found in rest)
        stuck |= {key for key, _ in first}
        for key in {key for key, _ in first} | {key for key, token in zip(step, tokens, strict=True) if token == eos}:
            for one in kinds:
                one.drop(key)
            keys = [k for k in keys if k != key]
    assert len(stuck) > 3
    assert {len(one) for one in kinds} == {len(keys)}


def test_threads_get_rows_of_one_lexer_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """However keys and grammars alternate, and each lexer has as many as the others."""
    monkeypatch.setattr(compiler_module, "APART", 3)
    compile, tokenizer = compiler(), trained("byte_level")
    params = [SamplingParams(structured=g) for g in (DATE, Grammar("regex", "(ab|c)+"))]
    for one in params * 3:
        compile(one).result(30)
        compile._pool.submit(lambda: None).result(30)
    compile._pool.shutdown()
    constraints = constraints_for(tokenizer, threads=3)
    for key in range(24):
        constraints.add(key, params[key % 2], compile(params[key % 2]).result(30))
    constraints.masks(np.arange(24))
    batch = constraints._batch
    assert batch is not None
    lexers = [constraints._of[row].lexer for _, row in batch.matchers]
    assert sorted(lexers) == lexers
    assert [lexers.count(lexer) for lexer in sorted(set(lexers))] == [4] * 6
