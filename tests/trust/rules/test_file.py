"""The file of rules: what it may say, what each key may use, and what a model may read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline import LLM
from ridgeline.serve.http.options import ServeOptions
from ridgeline.trust.rules.file import read_rules
from ridgeline.trust.rules.kinds import KINDS
from tests.serve.serving import Served, composed, serving
from tests.waiting import eventually

HEAD = 'version = "1"\n'
DEFAULT = HEAD + "[keys.default]\n"
RULE = '[rules.a]\npatterns = ["heron"]\naction = "redact"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "version"),
        ('version = ""', "version"),
        (HEAD, "keys.default"),
        ("x = 1\n" + DEFAULT, "'x'"),
        ('on_eror = "serve"\n' + DEFAULT, "did you mean 'on_error'"),
        ('on_error = "open"\n' + DEFAULT, "refuse, serve"),
        ('trace = "yes"\n' + DEFAULT, "true or false"),
        (DEFAULT + "model = []", "did you mean 'models'"),
        (DEFAULT + 'features = ["chats"]', "did you mean 'chat'"),
        (DEFAULT + 'audit = "all"', "none, hash, text"),
        (DEFAULT + "audit = true", "none, hash, text"),
        (DEFAULT + 'models = "a"', "list"),
        (DEFAULT + "limits = { max_token = 1 }", "did you mean 'max_tokens'"),
        (DEFAULT + "limits = { max_tokens = 0 }", "above 0"),
        (DEFAULT + "limits = { max_tokens = true }", "above 0"),
        (DEFAULT + "limits = 3", "table"),
        (DEFAULT + 'input = ["b"]\n' + RULE, "'b'"),
        (DEFAULT + 'output = ["pii"]', "there is none"),
        (DEFAULT + 'inherits = "b"', "inherits 'b'"),
        (DEFAULT + 'inherits = "b"\n[keys.b]\ninherits = "default"', "circle"),
        (DEFAULT + "[rules.a]\npatterns = ['a']", "action"),
        (DEFAULT + "[rules.a]\npatterns = ['a']\naction = 'redcat'", "did you mean 'redact'"),
        (DEFAULT + "[rules.a]\naction = 'redact'", "looks for nothing"),
        (DEFAULT + "[rules.a]\nkinds = ['emial']\naction = 'redact'", "did you mean 'email'"),
        (DEFAULT + "[rules.a]\npatterns = ['a*']\naction = 'redact'", "empty"),
        (DEFAULT + "[rules.a]\npatterns = ['(a']\naction = 'redact'", "without"),
        (DEFAULT + "[rules.a]\npatterns = ['a{1,100000}']\naction = 'block'", "repeats"),
        (DEFAULT + "[rules.a]\npatterns = ['a(?=b)']\naction = 'block'", "not supported"),
        (DEFAULT + RULE + "most = 0", "most is 0"),
        (DEFAULT + RULE + "word = 1", "word"),
        (DEFAULT + RULE + "says = 1", "says"),
        ("keys = 1\n" + HEAD, "table"),
        (HEAD + "[keys", "not TOML"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"rules.toml") as caught:
        read_rules(file)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_odd_bytes(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_bytes(b"\xef\xbb\xbf" + DEFAULT.encode())
    assert read_rules(file).version == "1"  # a byte order mark says nothing
    file.write_bytes(DEFAULT.encode() + b"# \xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_rules(file)
    many = ", ".join(f"'w{i}x'" for i in range(10_001))
    file.write_text(f"{DEFAULT}[rules.a]\naction = 'redact'\npatterns = [{many}]")
    with pytest.raises(ValueError, match="10001 patterns: at most 10000"):
        read_rules(file)


def test_a_section_of_no_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(DEFAULT + "[keys.staf]")
    with pytest.raises(ValueError, match="did you mean 'staff'"):
        read_rules(file, ["staff"])


def test_a_section_takes_what_it_does_not_say_from_another(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(
        DEFAULT + 'models = ["a*"]\nfeatures = ["chat"]\n[keys.b]\ninherits = "default"\n'
        'features = ["stream"]'
    )
    found = read_rules(file)
    assert found.of("b").features == {"stream"}
    assert (found.of("b").may_use("abc"), found.of("b").may_use("cab")) == (True, False)
    assert found.of("unknown") is found.keys["default"]


@pytest.mark.parametrize(
    ("kind", "text", "other"),
    [
        ("email", "a.b+c@d-e.co.uk", "a@b"),
        ("card", "4111 1111 1111 1111", "4111 1111 1111 1112"),
        ("iban", "DE89 3704 0044 0532 0130 00", "DE88 3704 0044 0532 0130 00"),
        ("phone", "+49 (30) 123-4567", "+49 3"),
        ("us_ssn", "123-45-6789", "123-45-678"),
        ("ip", "10.0.0.1", "10.0.1"),
        ("aws_key", "AKIA" + "A1" * 8, "AKIA" + "A1" * 7),
        ("github_token", "ghp_" + "a1B" * 12, "ghp_a"),
        ("secret_key", "sk-" + "a1" * 12, "sk-a1"),
        ("jwt", "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK", "eyJ.a.b"),
        ("private_key", "-----BEGIN RSA PRIVATE KEY-----", "-----BEGIN KEY-----"),
    ],
)
def test_kinds(kind: str, text: str, other: str, tmp_path: Path) -> None:
    from ridgeline.trust.text_rules.answer import screened

    file = tmp_path / "rules.toml"
    rule = f"[rules.a]\nkinds = ['{kind}']\naction = 'redact'"
    file.write_text(f"{DEFAULT}output = ['a']\n{rule}")
    rules = read_rules(file).of("x").output
    assert (
        screened(f"see {text} there", rules, lambda rule: None)[0] == f"see [{kind.upper()}] there"
    )
    assert screened(f"see {other} there", rules, lambda rule: None)[0] == f"see {other} there"
    assert set(KINDS) >= {kind}


KEYED = """
version = "7"
[keys.default]
models = ["tiny"]
features = ["chat", "completions", "stream"]
limits = { max_tokens = 3, tokens_per_day = 400 }
input = ["pii", "bird"]
[keys.free]
[keys.noted]
input = ["noted"]
output = ["noted"]
[rules]
pii = { kinds = ["email"], action = "redact" }
bird = { patterns = ["heron"], action = "block", says = "No birds, please." }
noted = { patterns = ["heron"], action = "note" }
"""


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text("plain k1\nfree k2\nnoted k3\nadmin k4 admin\n")
    (folder / "rules.toml").write_text(KEYED)
    with serving(model, rules=folder / "rules.toml", api_key_file=folder / "keys") as served:
        yield served


def _as(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_may_use_what_its_section_says(keyed: Served) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    assert keyed.call("/v1/completions", body, **_as("k1"))[0] == 200
    status, error = keyed.refused("/v1/completions", body | {"logprobs": 1}, **_as("k1"))
    assert (status, error["code"]) == (403, "policy_denied")
    assert "features of [keys.default]" in error["message"]
    assert keyed.call("/v1/completions", body | {"logprobs": 1}, **_as("k2"))[0] == 200
    status, error = keyed.refused("/v1/embeddings", {"input": "x"}, **_as("k1"))
    assert (status, error["code"]) == (403, "policy_denied")


def test_an_answer_has_no_more_tokens_than_its_key_may_have(keyed: Served) -> None:
    body = {"prompt": "x", "max_tokens": 9, "ignore_eos": True}
    _, answer, _ = keyed.call("/v1/completions", body, **_as("k1"))
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (
        3,
        "length",
    )
    _, answer, _ = keyed.call("/v1/completions", body, **_as("k2"))
    assert answer["usage"]["completion_tokens"] == 9


def test_what_a_model_may_not_read_is_replaced_or_refused(keyed: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "mail bob@example.com"}]}
    _, found, _ = keyed.call("/apply-template", chat, **_as("k1"))
    assert "mail [EMAIL]" in found["prompt"]
    chat = {"messages": [{"role": "user", "content": "a Her\u200bon"}], "max_tokens": 2}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "a heron", "max_tokens": 2}),
        ("/v1/completions", {"prompt": ["x", "a heron"], "max_tokens": 2}),
        ("/completion", {"prompt": "a heron", "n_predict": 2}),
        ("/v1/responses", {"input": "a heron", "max_output_tokens": 2}),
        ("/tokenize", {"prompt": "a heron"}),
    ):
        status, error = keyed.refused(path, body, **_as("k1"))
        assert (status, error["code"], error["message"]) == (
            400,
            "content_filter",
            "No birds, please.",
        )
    ids = keyed.call("/tokenize", {"prompt": "a heron"}, **_as("k2"))[1]["tokens"]
    status, error = keyed.refused("/v1/completions", {"prompt": ids}, **_as("k1"))
    assert (status, error["code"]) == (400, "content_filter")
    parts = [{"type": "text", "text": "a he"}, {"type": "text", "text": "ron"}]
    joined = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    status, answer, _ = keyed.call("/v1/chat/completions", joined, **_as("k1"))
    assert status == 400 or "heron" not in str(answer)


def test_what_is_only_noted_changes_nothing(keyed: Served) -> None:
    body = {"prompt": "a heron .", "max_tokens": 2, "echo": True, "seed": 1}
    free = keyed.call("/v1/completions", body, **_as("k2"))[1]["choices"]
    before = keyed.num_lines()
    assert keyed.call("/v1/completions", body, **_as("k3"))[1]["choices"] == free
    eventually(lambda: any("key=noted" in line for line in keyed.lines[before:]))
    (line,) = [line for line in keyed.lines[before:] if "key=noted" in line]
    assert "noted:input:note" in line
    assert "noted:content:note" in line


def test_a_bad_file_leaves_the_rules_that_hold(keyed: Served, tmp_path: Path) -> None:
    file = keyed.running.options.rules
    assert file is not None
    good = file.read_text()
    try:
        file.write_text("version = 3")
        keyed.loop.call_soon_threadsafe(keyed.running.reload_keys)
        body = {"prompt": "a heron", "max_tokens": 2}
        assert keyed.refused("/v1/completions", body, **_as("k1"))[0] == 400
        assert any("the rules were not reloaded" in line for line in keyed.lines)
        file.write_text(good.replace("[keys.default]", '[keys.default]\naudit = "text"'))
        keyed.loop.call_soon_threadsafe(keyed.running.reload_keys)
        eventually(lambda: any("[keys.default] needs --audit" in line for line in keyed.lines))
        assert keyed.refused("/v1/completions", body, **_as("k1"))[0] == 400
        file.write_text(good.replace("heron", "stork"))
        keyed.loop.call_soon_threadsafe(keyed.running.reload_keys)
        assert keyed.call("/v1/completions", body, **_as("k1"))[0] == 200
    finally:
        file.write_text(good)
        keyed.loop.call_soon_threadsafe(keyed.running.reload_keys)


def test_a_trace_beside_rules_must_be_allowed(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(DEFAULT)
    base = {"kv_cache_memory": "1MiB", "threads": 1}
    with (
        LLM(model, trace=str(tmp_path / "trace"), **base) as llm,
        pytest.raises(ValueError, match="trace = true"),
    ):
        composed(llm, ServeOptions(rules=file))
    file.write_text("trace = true\n" + DEFAULT)
    with serving(model, {"trace": str(tmp_path / "other")}, rules=file):
        pass


def test_a_server_without_rules_imports_nothing_of_them() -> None:
    code = "import sys, ridgeline.serve.main, ridgeline.trust.stages, ridgeline.cli.main\n"
    code += "print(*sorted(m for m in sys.modules if '.guard' in m or 'trust.rules' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    room = "ridgeline.trust.guards"  # of which their list alone is there
    assert done.stdout.split() == [room, f"{room}.guard_models"]
