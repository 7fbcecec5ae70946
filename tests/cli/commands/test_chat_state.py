"""What a chat on the terminal knows: its commands, what they say, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli.commands.chat_state import COMMAND, ChatState
from ridgeline.core.params import SamplingParams


@pytest.fixture
def state() -> ChatState:
    return ChatState("tiny", SamplingParams(max_tokens=64))


def talk(state: ChatState, *texts: str) -> None:
    for i, text in enumerate(texts):
        state.messages.append({"role": ("user", "assistant")[i % 2], "content": text})


def test_parameters_are_set_by_our_names_and_ollamas(state: ChatState) -> None:
    assert state.do("/set temperature 0.25") == "temperature is 0.25"
    assert state.do("/set parameter top_k 20") == "top_k is 20"
    assert state.do("/set parameter num_predict 100") == "max_tokens is 100"
    state.do("/set parameter repeat_penalty 1.1")
    state.do('/set stop END "###"')
    state.do("/set seed 7")
    params = state.params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 20, 100)
    assert (params.repetition_penalty, params.stop, params.seed) == (1.1, ("END", "###"), 7)
    state.do("/set seed none")
    assert state.params.seed is None


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/set temperature hot", "temperature is a number, not 'hot'"),
        ("/set temperature 1000", "temperature"),
        ("/set top_k 1.5", "top_k"),
        ("/set colour red", "where NAME is one of system, temperature"),
        ("/set temperature", "where NAME is one of"),
        ("/set", "/set NAME VALUE"),
        ("/sow", "there is no command /sow; /help lists all"),
        ("/save", "need the name of a file"),
        ("/load", "need the name of a file"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(state: ChatState, line: str, part: str) -> None:
    before = state.params
    with pytest.raises(ValueError, match=part):
        state.do(line)
    assert state.params == before


def test_the_system_prompt_goes_first(state: ChatState) -> None:
    talk(state, "Hi", "Hello")
    state.do('/set system "Answer in Latin."')
    assert state.prompt[0] == {"role": "system", "content": "Answer in Latin."}
    assert [one["role"] for one in state.prompt] == ["system", "user", "assistant"]
    state.do("/set system")
    assert state.prompt == state.messages


def test_show_tells_model_system_and_parameters(state: ChatState) -> None:
    state.do("/set system Be brief.")
    state.do("/set temperature 0.5")
    talk(state, "Hi", "Hello")
    shown = state.do("/show")
    for part in (
        "tiny",
        "Be brief.",
        "1 so far",
        "temperature         0.5",
        "max_tokens          64",
    ):
        assert part in shown
    assert "seed" not in shown


def test_what_is_saved_is_loaded_again(state: ChatState, tmp_path: Path) -> None:
    talk(state, "Grüße", "Hello\nyou")
    state.do("/set system Be brief.")
    state.do("/set temperature 0.5")
    assert state.do(f"/save {tmp_path / 'talk'}") == f"kept in {tmp_path / 'talk.json'}"
    other = ChatState("larger", SamplingParams(max_tokens=10))
    said = other.do(f"/load {tmp_path / 'talk.json'}")
    assert said == f"1 answers from {tmp_path / 'talk.json'}, of tiny"
    assert other.messages == state.messages
    assert (other.system, other.params.temperature) == ("Be brief.", 0.5)
    assert other.params.max_tokens == 10  # what was not changed is this chat's own
    other.do("/clear")
    assert other.messages == []


@pytest.mark.parametrize(
    "content",
    [
        "no JSON", "[]", "{}", '{"messages": 3}', '{"messages": [{"role": "system"}]}',
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"messages": [], "parameters": {"colour": 1}}', '{"messages": [], "system": 4}',
        '{"messages": [], "parameters": {"temperature": 1e9}}',
    ],
)  # fmt: skip
def test_another_file_is_refused_and_the_chat_stays(
    state: ChatState, tmp_path: Path, content: str
) -> None:
    talk(state, "Hi", "Hello")
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json|temperature"):
        state.do(f"/load {file}")
    assert len(state.messages) == 2
    with pytest.raises(OSError, match="missing"):
        state.do(f"/load {tmp_path / 'missing.json'}")


def test_a_path_is_a_message_and_no_command() -> None:
    assert COMMAND.match("/show")
    assert COMMAND.match("/Set temperature 1")
    assert not COMMAND.match("/etc/hosts has a line that I do not understand")
    assert not COMMAND.match("// a comment")


def test_a_kept_conversation_is_plain_json(state: ChatState, tmp_path: Path) -> None:
    talk(state, "Hi", "Hello")
    state.do(f"/save {tmp_path / 'talk.json'}")
    document = json.loads((tmp_path / "talk.json").read_text("utf-8"))
    assert document == {
        "model": "tiny", "system": "", "parameters": {}, "messages": state.messages,
    }  # fmt: skip
