"""Guards as rules: prompts and answers are judged on every route, and raw bytes are searched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, BadRequestError, InternalServerError

from ridgeline import LLM
from ridgeline.core.step import Step, StepOutput
from ridgeline.serve.http.options import ServeOptions
from tests.serve.serving import Served, composed, serving
from tests.trust.guards.models import write_guard
from tests.trust.guards.test_moderations import ENGINE, Oracle
from tests.trust.rules.test_file import DEFAULT
from tests.trust.rules.test_routes import (
    ENDS,
    REGEX,
    ROUTES,
    SECRET,
    is_clean,
    sent,
)
from tests.waiting import eventually

RULE = '[rules.unsafe]\nmodel = "guard"\n'
SAYS = "I may not say that."


@pytest.fixture(scope="module")
def guard_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_guard(tmp_path_factory.mktemp("models") / "guard", "Llama Guard 3 8B")


class Faulty:
    """A runner that fails once its steps are used up."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.num_steps: float = float("inf")

    def execute(self, step: Step) -> StepOutput:
        self.num_steps -= 1
        if self.num_steps < 0:
            raise RuntimeError("the guard is broken")
        output: StepOutput = self._runner.execute(step)
        return output


@contextmanager
def guarded(
    model: Path, guard_path: Path, folder: Path, text: str, **options: Any
) -> Iterator[tuple[Served, Faulty]]:
    """A server with a rules' file of this text, and its guard's runner."""
    file = folder / "rules.toml"
    file.write_text(text)
    with LLM(guard_path, **ENGINE) as guard:
        faulty = guard.engine.runner = Faulty(guard.engine.runner)
        with serving(model, guards={"guard": guard}, rules=file, **options) as served:
            yield served, faulty
            served.assert_idle()
        assert not guard.engine.requests


def of_output(at: float, action: str = "block", **more: Any) -> str:
    fields = "".join(f"{name} = {value!r}\n" for name, value in more.items())
    rule = f"{RULE}action = {action!r}\nat = {at}\nsays = {SAYS!r}\n{fields}"
    return f'{DEFAULT}output = ["unsafe"]\n{rule}'


def num_hits(served: Served, action: str, rule: str, where: str) -> float:
    """What the metrics count of a rule."""
    labels = (f'action="{action}"', f'rule="{rule}"', f'where="{where}"')
    return sum(
        value
        for name, value in served.metrics().items()
        if name.startswith("ridgeline:rule_hits_total") and all(one in name for one in labels)
    )


@pytest.fixture(scope="module")
def strict(
    roomy: Path,
    guard_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """Every answer is unsafe enough."""
    folder = tmp_path_factory.mktemp("rules")
    with guarded(roomy, guard_path, folder, of_output(1e-9)) as (served, _):
        yield served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ROUTES)
def test_no_byte_that_a_guard_forbids_leaves_the_socket(
    strict: Served, name: str, *, stream: bool
) -> None:
    path, body = ROUTES[name]
    stream &= not ("use_beam_search" in body or "best_of" in body)
    status, data = sent(strict, path, body | {"stream": stream, "seed": 1})
    assert status == 200, data
    assert is_clean(data), data
    assert b"bob" not in data
    assert ENDS.get(path, b'"stop_type":"limit"') in data, data


def test_what_a_guard_lets_through_is_as_without_one(
    roomy: Path,
    guard_path: Path,
    tmp_path: Path,
) -> None:
    some = ("chat with logprobs", "three chats", "messages")
    bodies = [ROUTES[name] for name in some]
    with serving(roomy) as served:
        plain = [sent(served, path, body | {"stream": False, "seed": 1}) for path, body in bodies]
    with guarded(roomy, guard_path, tmp_path, of_output(1.0, every=3)) as (served, _):
        for (path, body), (status, expected) in zip(bodies, plain, strict=True):
            for stream in (False, True):
                found = sent(served, path, body | {"stream": stream, "seed": 1})
                assert found[0] == status == 200
                assert SECRET.encode() in expected
                if not stream:
                    assert len(found[1]) == pytest.approx(len(expected), abs=40)  # times differ
                    assert SECRET.encode() in found[1]
                else:
                    assert b"content_filter" not in found[1]


def test_the_threshold_is_that_of_the_guards_logits(
    roomy: Path,
    guard_path: Path,
    tmp_path: Path,
) -> None:
    """The verdict on an answer, computed again from all logits, is just below or above it.

    An answer that goes on with a message is judged as the message that the two are.
    """
    oracle = Oracle(guard_path)
    said = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "x bob@example.com y"},
    ]
    _, score = oracle.shares(oracle.prompt(said), "\n\n", ["safe", "unsafe"])
    oracle.close()
    path, body = ROUTES["chat"]
    begun = [said[0], {"role": "assistant", "content": "x bob@exa"}]
    form = {"structured_outputs": {"regex": "mple[.]com y"}}
    going_on = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    for at, is_blocked in ((score * 0.999, True), (score * 1.001, False)):
        with guarded(roomy, guard_path, tmp_path, of_output(at)) as (served, _):
            for asked in (body, {**body, **form, **going_on}):
                status, data = sent(served, path, asked)
                assert status == 200
                assert (b"content_filter" in data) == is_blocked, (score, at)
                assert (SAYS.encode() in data) == is_blocked


def test_prompts_are_judged_before_they_are_computed(
    roomy: Path,
    guard_path: Path,
    tmp_path: Path,
) -> None:
    texts = ["The cat sat on the mat", "x"]
    with serving(guard_path, ENGINE) as served:
        found = served.client().moderations.create(input=texts).results
    scores = [one.model_extra["ridgeline"]["score"] for one in found if one.model_extra]
    bad, good = sorted(texts, key=lambda one: -scores[texts.index(one)])
    rule = DEFAULT + 'input = ["unsafe"]\n' + RULE + f'action = "block"\nat = {sum(scores) / 2}\n'
    with guarded(roomy, guard_path, tmp_path, rule) as (served, _):
        client = served.client()

        def chat(text: str) -> Any:
            said: Any = [{"role": "user", "content": text}]
            return client.chat.completions.create(model="tiny", messages=said, max_tokens=2)

        assert chat(good).choices
        before = served.valve.num_steps
        for asked in (
            lambda: chat(bad),
            lambda: client.completions.create(model="tiny", prompt=[good, bad], max_tokens=2),
            lambda: client.embeddings.create(model="tiny", input=bad),
            lambda: client.responses.create(model="tiny", input=bad),
        ):
            with pytest.raises(BadRequestError) as caught:
                asked()
            assert caught.value.code == "content_filter"
            assert "unsafe" in str(caught.value)
        assert served.valve.num_steps == before
        assert client.embeddings.create(model="tiny", input=good).data


def test_a_note_is_counted_and_lets_pass(
    roomy: Path,
    guard_path: Path,
    tmp_path: Path,
) -> None:
    with guarded(roomy, guard_path, tmp_path, of_output(1e-9, action="note", every=2)) as (
        served,
        _,
    ):
        path, body = ROUTES["chat"]
        before = len(served.lines)
        status, data = sent(served, path, body)
        assert (status, SECRET.encode() in data) == (200, True)
        assert num_hits(served, "note", "unsafe", "output") == 1
        eventually(lambda: any("unsafe:output:note" in one for one in served.lines[before:]))


def test_text_is_held_until_it_was_judged(
    roomy: Path,
    guard_path: Path,
    tmp_path: Path,
) -> None:
    with guarded(roomy, guard_path, tmp_path, of_output(1.0, every=4)) as (served, faulty):
        said: Any = [{"role": "user", "content": "x"}]
        faulty.num_steps = 0  # no verdict can come, so not a byte of text may
        shown: list[str] = []

        def read() -> None:
            stream = served.client().chat.completions.create(
                model="tiny",
                messages=said,
                max_tokens=11,
                stream=True,
                seed=3,
                logprobs=True,
                extra_body={"ignore_eos": True},
            )
            shown.extend(chunk.choices[0].delta.content or "" for chunk in stream)

        with pytest.raises(APIError, match="a rule of this server has failed"):
            read()
        assert not any(shown)
        assert num_hits(served, "error", "error", "output") == 1


@pytest.mark.parametrize("where", ["input", "output"])
def test_a_guard_that_fails_refuses_unless_the_file_says_otherwise(
    roomy: Path,
    guard_path: Path,
    tmp_path: Path,
    where: str,
) -> None:
    rule = f'{where} = ["unsafe"]\n' + RULE + 'action = "block"\nat = 1.0\n'
    said: Any = [{"role": "user", "content": "x"}]
    for mode in ("refuse", "serve"):
        text = f'on_error = "{mode}"\n' + DEFAULT + rule
        with guarded(roomy, guard_path, tmp_path, text) as (served, faulty):
            faulty.num_steps = 0
            ask = served.client().chat.completions.create
            if mode == "refuse":
                with pytest.raises(InternalServerError, match="a rule of this server"):
                    ask(model="tiny", messages=said, extra_body=REGEX)
            else:
                answer = ask(model="tiny", messages=said, max_tokens=60, extra_body=REGEX)
                assert SECRET in (answer.choices[0].message.content or "")
            assert num_hits(served, "error", "error", where) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (RULE, "action"),
        (RULE + 'action = "redact"', "block, note"),
        (RULE + 'action = "block"\nat = 0', "above 0"),
        (RULE + 'action = "block"\nat = 2', "up to 1"),
        (RULE + 'action = "block"\nat = true', "above 0"),
        (RULE + 'action = "block"\nevery = 0', "number of tokens"),
        (RULE + 'action = "block"\nkinds = ["email"]', "'kinds'"),
        (RULE + 'action = "block"\ncategories = "S1"', "list"),
        (RULE + 'action = "block"\ncategories = ["S99"]', "has no category 'S99'"),
        ('[rules.unsafe]\nmodel = ""\naction = "block"', "name of a guard"),
        ('[rules.unsafe]\nmodel = "other"\naction = "block"', "no guard 'other'"),
    ],
)
def test_bad_rules_by_guards_are_refused_at_the_start(
    small_guard: LLM, tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(DEFAULT + 'input = ["unsafe"]\n' + text)
    with pytest.raises(ValueError, match=says):
        composed(small_guard, ServeOptions(rules=file), name="guard")


@pytest.fixture(scope="module")
def small_guard(guard_path: Path) -> Iterator[LLM]:
    with LLM(guard_path, **ENGINE) as llm:
        yield llm


def test_categories_narrow_a_rule(roomy: Path, guard_path: Path, tmp_path: Path) -> None:
    path, body = ROUTES["chat"]
    for categories, at in ((["S1", "S9 indiscriminate weapons"], 1e-9), (["S1"], 1.0)):
        text = of_output(at, categories=categories)
        with guarded(roomy, guard_path, tmp_path, text) as (served, _):
            _, data = sent(served, path, body)
            assert (b"content_filter" in data) == (at < 1)
