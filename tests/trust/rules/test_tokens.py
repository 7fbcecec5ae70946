"""No text, token, token in another's place or end of an answer tells what a rule forbids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.serving import Served, serving
from tests.trust.rules.reading import Told
from tests.trust.rules.test_routes import CHAT, ROUTES, assert_untold, rules_file, sent

BEGUN, REST = "x bob@exa", "mple.com y"  # the secret's beginning is none itself
FORM = {"structured_outputs": {"regex": "mple[.]com y"}}
REST_GRAMMAR = 'root ::= "mple" [.] "com y"'
RANKED = {"logprobs": 5, "return_token_ids": True}
LETTERS = {"structured_outputs": {"regex": "[a-z]{12}"}}
PREFILLED = [{"role": "user", "content": "x"}, {"role": "assistant", "content": BEGUN}]
GOING_ON: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": (
        "/v1/chat/completions",
        {
            **CHAT,
            **FORM,
            "messages": PREFILLED,
            "continue_final_message": True,
            "add_generation_prompt": False,
            "logprobs": True,
            "top_logprobs": 5,
        },
    ),
    "messages": (
        "/v1/messages",
        {"model": "tiny", "max_tokens": 60, "messages": PREFILLED, **FORM},
    ),
    "a completion": ("/v1/completions", {"prompt": BEGUN, "max_tokens": 60, **FORM, **RANKED}),
    "a completion that echoes": (
        "/v1/completions",
        {"prompt": BEGUN, "max_tokens": 60, "echo": True, **FORM, **RANKED},
    ),
    "a middle": (
        "/v1/completions",
        {"prompt": BEGUN, "suffix": "z", "max_tokens": 60, **FORM, **RANKED},
    ),
    "llama.cpp": (
        "/completion",
        {"prompt": BEGUN, "n_predict": 60, "n_probs": 5, "grammar": REST_GRAMMAR},
    ),
    "infill": (
        "/infill",
        {"input_prefix": BEGUN, "input_suffix": "z", "n_predict": 60, "grammar": REST_GRAMMAR},
    ),
    "Triton": (
        "/v2/models/tiny/generate",
        {"text_input": BEGUN, "max_tokens": 60, **FORM},
    ),
}


@pytest.fixture(scope="module", params=["block", "redact"])
def ruled(
    roomy: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    file = rules_file(tmp_path_factory.mktemp("rules") / "rules.toml", request.param)
    with serving(roomy, rules=file) as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", GOING_ON)
def test_a_match_that_began_in_the_text_before_is_found(
    ruled: Served, name: str, *, stream: bool
) -> None:
    path, body = GOING_ON[name]
    if name == "Triton" and stream:
        path, stream = path + "_stream", False
    status, data = sent(ruled, path, body | ({"stream": stream} if name != "Triton" else {}))
    assert status == 200, data
    told = Told(data, ruled.llm.text.tokenizer.token_bytes)
    for span in told.spans():
        assert b"mple.c" not in span, (span, data)  # mple alone could be of another name
    ruled.assert_idle()


def test_the_text_before_is_a_part_of_no_other_answer(ruled: Served) -> None:
    """Where a conversation is not continued, its messages are texts of their own."""
    body = {**CHAT, **FORM, "messages": [*PREFILLED, {"role": "user", "content": BEGUN}]}
    status, data = sent(ruled, "/v1/chat/completions", body)
    assert status == 200
    assert REST.encode() in data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["stop", "stop_token_ids"])
def test_what_has_ended_an_answer_is_not_told_if_it_completes_a_match(
    ruled: Served, by: str, *, stream: bool
) -> None:
    text = "x bob@example[.]com y"
    ends: dict[str, list[Any]] = {"stop": ["com"]}
    ends |= {"stop_token_ids": ruled.llm.text.tokenizer.encode("c")}
    body = {"prompt": "z", "max_tokens": 60, "structured_outputs": {"regex": text}, **RANKED}
    status, data = sent(ruled, "/v1/completions", body | {by: ends[by], "stream": stream})
    assert status == 200
    told = Told(data, ruled.llm.text.tokenizer.token_bytes)
    assert all(b"bob@" not in span for span in told.spans()), data
    reasons = [one for path, one in told.texts.items() if path.endswith("stop_reason")]
    assert not any(reasons)
    assert f'"stop_reason":{ends["stop_token_ids"][0]}'.encode() not in data


def test_what_ends_another_answer_is_told(ruled: Served) -> None:
    body = {"prompt": "z", "max_tokens": 9, "structured_outputs": {"regex": "a dog runs"}}
    for ends, reason in (({"stop": ["og"]}, "og"), ({"stop_token_ids": [70]}, None)):
        _, data = sent(ruled, "/v1/completions", body | ends)
        (choice,) = json.loads(data)["choices"]
        assert choice.get("stop_reason") == reason


def ranked_letters(row: list[tuple[bytes, list[bytes]]]) -> list[tuple[int, bytes]]:
    """Return the places of tokens of letters that were not chosen, and these tokens."""
    return [
        (i, other)
        for i, (token, others) in enumerate(row)
        for other in others
        if i and other != token and other.isalpha()
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"max_tokens": 12, "echo": True, "prompt_logprobs": 5, **RANKED}),
        (
            "/v1/completions",
            {"max_tokens": 12, "return_tokens_as_token_ids": True, **RANKED, **LETTERS},
        ),
        ("/completion", {"n_predict": 12, "n_probs": 10, "grammar": "root ::= [a-z]+"}),
    ],
    ids=["completions", "ids", "llama.cpp"],
)
def test_no_token_is_told_that_would_complete_a_match(
    roomy: Path, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """The rule is made of what stands before one of them: so all others are still told of."""
    body = {"prompt": "xy, and The ants", "temperature": 0, "seed": 1, **body}
    with serving(roomy) as served:
        before, token_bytes = sent(served, path, body)[1], served.llm.text.tokenizer.token_bytes
    rows = Told(before, token_bytes).rows
    whole = {name: b"".join(token for token, _ in row) for name, row in rows.items()}
    cases = [
        (name, i, other, b"".join(token for token, _ in row[:i])[-3:])
        for name, row in rows.items()
        for i, other in ranked_letters(row)
    ]
    name, place, other, context = next(
        case
        for case in cases
        if case[3].strip().isalnum() and (case[3] + case[2]).lower() not in whole[case[0]].lower()
    )
    pattern = (context + other).decode()
    rules = f'version = "1"\n[keys.default]\noutput = ["a"]\n[rules.a]\npatterns = ["{pattern}"]\n'
    file = rules_file(tmp_path / "rules.toml", text=rules + 'action = "redact"\nword = false')
    with serving(roomy, rules=file) as served:
        after = Told(sent(served, path, body)[1], token_bytes).rows
    expected = rows[name][place][1]
    assert after[name][place][1] == [one for one in expected if one != other]
    assert [token for token, _ in after[name]] == [token for token, _ in rows[name]]


@pytest.mark.full
def test_ten_thousand_answers_tell_no_token_of_a_match(ruled: Served) -> None:
    """Half of them: the fixture serves both actions."""
    routes = [*ROUTES.values(), *GOING_ON.values()]
    asked = itertools.islice(itertools.cycle(itertools.product(routes, (False, True))), 5000)
    for seed, ((path, body), stream) in enumerate(asked):
        is_whole = "use_beam_search" in body or "best_of" in body or path.startswith("/v2")
        changed = {"seed": seed} | ({} if is_whole else {"stream": stream})
        if path == "/v1/completions" and not is_whole:
            changed |= RANKED | {"stop_token_ids": [seed % 400]}
            changed |= {} if stream else {"prompt_logprobs": 3}
        status, data = sent(ruled, path, body | changed)
        assert status == 200, data
        assert_untold(ruled, data)


def test_tokens_of_thoughts_that_are_not_shown_are_searched_too() -> None:
    """They are told of, though no piece of the message has their text."""
    from ridgeline.core.step import TokenLogprobs
    from ridgeline.trust.rules.tokens import SearchedTokens
    from ridgeline.trust.text_rules.answer import TextRule, TextRules
    from ridgeline.trust.text_rules.patterns import TextPattern

    spelled = [b"a ", b"he", b"ron", b" fl", b"ies", b"\xc3", b"\xa9", b"n"]

    class Decoding:
        is_whole = True
        _held = b""

        def __call__(self, token_id: int, /) -> str:
            self._held += spelled[token_id]
            try:
                text, self._held = self._held.decode(), b""
            except UnicodeDecodeError:
                self.is_whole = False
                return ""
            self.is_whole = True
            return text

    def told(pattern: str, tokens: list[int], top: Callable[[int], list[int]]) -> list[Any]:
        rules = TextRules([TextRule("x", TextPattern(pattern, apart=""), "redact", "[X]")])
        searched = SearchedTokens(rules, lambda text: True, spelled.__getitem__, Decoding())
        found = [
            searched.feed(TokenLogprobs(one, 0.0, 1, tuple((t, -1.0) for t in top(one))))
            for one in tokens
        ]
        searched.finish()
        assert all(one.is_known for one in found)
        entries = [one.entry for one in found if one.is_told]
        return [(e.token, [t for t, _ in e.top]) for e in entries if isinstance(e, TokenLogprobs)]

    assert told("heron", [0, 1, 2, 3], lambda one: []) == [(0, []), (3, [])]
    assert told("heron", [0, 1, 3, 4], lambda one: [2]) == [(0, [2]), (1, [2]), (3, []), (4, [2])]
    # A letter of two tokens, of which the second would complete the match.
    assert told("fl\xe9", [3, 5, 7], lambda one: [6]) == [(3, [6]), (5, [6]), (7, [])]
    assert told("\xe9n", [5, 6, 7, 0], lambda one: []) == [(0, [])]
