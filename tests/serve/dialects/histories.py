"""What conversations have of other models and hosted tools: each type that the clients' own
packages know, once, in a row that says what is read of it and what is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

IMAGE_URL = "data:image/png;base64,AAAA"
SHOT = {"type": "computer_screenshot", "image_url": IMAGE_URL}


class Row(NamedTuple):
    """Types, separated by spaces, that stand in these items.

    Attributes:
        types: their names.
        items: items of a conversation, blocks or parts of a message.
        words: what the prompt has of it.
        lost: types in it that are named as left out.
    """

    types: str
    items: list[dict[str, Any]]
    words: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def _item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "id": f"{kind}_1", "status": "completed", **fields}


def _left_out(kind: str, **fields: Any) -> Row:
    return Row(kind, [_item(kind, **fields)], (), (kind,))


def _call(kind: str, result: str, asked: dict[str, Any], returned: Any, *words: str) -> Row:
    call = _item(kind, call_id=f"of_{kind}", **asked)
    answer = _item(result, call_id=f"of_{kind}", output=returned)
    return Row(f"{kind} {result}", [call, answer], words)


OUTPUT_TEXT = {"type": "output_text", "text": "river", "annotations": []}
ITEMS = [  # of /v1/responses
    Row("message", [_item("message", role="assistant", content=[OUTPUT_TEXT])], ("river",)),
    Row("function_call function_call_output", [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": "x"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [
            {"type": "input_text", "text": "river"},
            {"type": "input_image", "image_url": IMAGE_URL}]},
    ], ("river", "[input_image: not shown"), ("input_image",)),
    Row("reasoning", [{"type": "reasoning", "summary": [],
                       "content": [{"type": "reasoning_text", "text": "river"}]}]),
    _call("custom_tool_call", "custom_tool_call_output",
          {"name": "apply_patch", "input": "*** Begin"}, "done",
          "apply_patch", "*** Begin", "done"),
    Row("local_shell_call local_shell_call_output", [
        _item("local_shell_call", call_id="c2", action={"type": "exec", "command": ["ls"]}),
        {"type": "local_shell_call_output", "id": "c2", "output": "a.py"},
    ], ("local_shell", "ls", "a.py")),
    _call("shell_call", "shell_call_output", {"action": {"commands": ["ls"]}},
          [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
          "shell", "ls", "a.py"),
    _call("apply_patch_call", "apply_patch_call_output",
          {"operation": {"type": "create_file", "path": "b.py", "diff": "+1"}}, None,
          "apply_patch", "b.py", "completed"),
    Row("computer_call computer_call_output", [
        _item("computer_call", call_id="c3", action={"type": "screenshot"}),
        {"type": "computer_call_output", "call_id": "c3", "output": SHOT},
    ], ("computer", "screenshot", "[computer_screenshot: not shown"), ("computer_screenshot",)),
    Row("tool_search_call tool_search_output", [
        _item("tool_search_call", call_id="c4", arguments={"query": "maps"}),
        _item("tool_search_output", call_id="c4", tools=[{"type": "function", "name": "map"}]),
    ], ("tool_search", "maps", "map")),
    Row("program program_output", [
        _item("program", call_id="c5", code="f()", fingerprint="x"),
        _item("program_output", call_id="c5", result="41 and 1"),
    ], ("program", "f()", "41 and 1")),
    Row("mcp_call", [_item("mcp_call", name="find", server_label="s", arguments='{"q": "x"}',
                           output="found")], ("find", '"q"', "found")),
    Row("file_search_call", [_item("file_search_call", queries=["x"], results=[
        {"file_id": "f", "filename": "a.txt", "text": "river", "score": 0.5}])],
        ("file_search", "a.txt", "river")),
    Row("code_interpreter_call", [_item("code_interpreter_call", code="1 + 1", outputs=[
        {"type": "logs", "logs": "2.0"}, {"type": "image", "url": IMAGE_URL}])],
        ("code_interpreter", "1 + 1", "2.0"), ("image",)),
    _left_out("web_search_call", action={"type": "search", "query": "x"}),
    _left_out("image_generation_call", result="AAAA"),
    _left_out("mcp_list_tools", server_label="s", tools=[]),
    _left_out("mcp_approval_request", server_label="s", name="f", arguments="{}"),
    _left_out("mcp_approval_response", approval_request_id="a", approve=True),
    _left_out("additional_tools", role="developer", tools=[]),
    _left_out("configuration_update"),
    _left_out("compaction", encrypted_content="x"),
    _left_out("compaction_trigger"),
    _left_out("item_reference"),
]  # fmt: skip
# Parts of a message of /v1/responses: what the user says is read whole, or refused.
INPUT_PARTS = {"input_text": True, "input_image": False, "input_file": False}
OUTPUT_PARTS = [
    Row("output_text", [OUTPUT_TEXT], ("river",)),
    Row("refusal", [{"type": "refusal", "refusal": "I will not."}], ("I will not.",)),
]

_RIVER = {"type": "text", "text": "river"}
_PAGE = {"type": "document", "source": {"type": "text", "media_type": "text/plain",
                                        "data": "a page"}}  # fmt: skip


def _hosted(kind: str, content: Any, *words: str, name: str = "tool_x", lost: Any = ()) -> Row:
    call = {"type": "server_tool_use", "id": "s1", "name": name, "input": {"query": "maps"}}
    result = {"type": kind, "tool_use_id": "s1", "content": content}
    return Row(f"server_tool_use {kind}", [call, result, _RIVER], (name, "maps", *words), lost)


BLOCKS = [  # of an assistant's message of /v1/messages
    Row("text", [_RIVER], ("river",)),
    Row("thinking", [{"type": "thinking", "thinking": "Hm", "signature": "x"}, _RIVER]),
    Row("redacted_thinking", [{"type": "redacted_thinking", "data": "x"}, _RIVER]),
    _hosted("web_search_tool_result", [
        {"type": "web_search_result", "url": "https://a.example", "title": "A",
         "encrypted_content": "x"}], "https://a.example", lost=("encrypted_content",)),
    _hosted("web_fetch_tool_result", {"type": "web_fetch_result", "url": "https://a.example",
                                      "content": _PAGE}, "https://a.example", "a page"),
    _hosted("code_execution_tool_result", {"type": "code_execution_result", "stdout": "42",
                                           "stderr": "", "return_code": 0, "content": []}, "42"),
    _hosted("bash_code_execution_tool_result", {
        "type": "bash_code_execution_result", "stdout": "43", "stderr": "", "return_code": 0,
        "content": []}, "43"),
    _hosted("text_editor_code_execution_tool_result", {
        "type": "text_editor_code_execution_view_result", "file_type": "text",
        "content": "def f"}, "def f"),
    _hosted("tool_search_tool_result", {
        "type": "tool_search_tool_search_result", "tool_references": [
            {"type": "tool_reference", "tool_name": "map"}]}, "map"),
    _hosted("advisor_tool_result", {"type": "advisor_result", "text": "look again"}, "look again"),
    Row("mcp_tool_use mcp_tool_result", [
        {"type": "mcp_tool_use", "id": "m1", "name": "find", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m1", "is_error": False,
         "content": [{"type": "text", "text": "found"}]}], ("find", "found")),
    Row("compaction", [{"type": "compaction", "content": "what was said"}], ("what was said",)),
    Row("fallback", [{"type": "fallback", "to": {"model": "x"}}, _RIVER], ("river",),
        ("fallback",)),
    Row("mcp_tool_listing", [{"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": []}],
        (), ("mcp_tool_listing",)),
]  # fmt: skip
USER_BLOCKS = [
    Row("document", [_PAGE], ("a page",)),
    Row("search_result", [{"type": "search_result", "source": "https://a.example", "title": "A",
                           "content": [_RIVER]}], ("https://a.example", "river")),
    Row("container_upload", [{"type": "container_upload", "file_id": "f"}, _RIVER], ("river",),
        ("container_upload",)),
    Row("tool_addition", [{"type": "tool_addition", "tool": {"name": "f"}}, _RIVER], ("river",),
        ("tool_addition",)),
    Row("tool_removal", [{"type": "tool_removal", "tool": {"name": "f"}}, _RIVER], ("river",),
        ("tool_removal",)),
]  # fmt: skip
RESULT_BLOCKS = [  # of a tool_result, which follows a tool_use
    Row("text", [_RIVER], ("river",)),
    Row("document", [_PAGE], ("a page",)),
    USER_BLOCKS[1],
    Row("image", [{"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                               "data": "AAAA"}}], ("[image: not",), ("image",)),
    Row("tool_reference", [{"type": "tool_reference", "tool_name": "map"}], ("map",)),
    Row("browser_state", [{"type": "browser_state", "tabs": [{"url": "https://a.example"}]}],
        ("https://a.example",)),
]  # fmt: skip
APART = ("image", "tool_use", "tool_result")  # blocks that have tests of their own

_FUNCTION = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_CUSTOM = {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
MESSAGES = [  # of /v1/chat/completions, by role
    Row("developer", [{"role": "developer", "content": "river"}], ("river",)),
    Row("system", [{"role": "system", "content": "river"}], ("river",)),
    Row("user", [{"role": "user", "content": [_RIVER]}], ("river",)),
    Row("assistant", [{"role": "assistant", "content": None}]),
    Row("assistant", [{"role": "assistant", "content": None, "refusal": "I will not."}],
        ("I will not.",)),
    Row("assistant", [{"role": "assistant", "content": None, "reasoning_content": "Hm"}]),
    Row("assistant", [{"role": "assistant", "content": None, "audio": {"id": "a"}}]),
    Row("tool", [{"role": "assistant", "content": None, "tool_calls": [_FUNCTION]},
                 {"role": "tool", "tool_call_id": "c1", "content": [_RIVER, {
                     "type": "image_url", "image_url": {"url": IMAGE_URL}}]}],
        ("river", "[image_url: not shown"), ("image_url",)),
    Row("function", [{"role": "assistant", "content": None,
                      "function_call": {"name": "f", "arguments": '{"a": 1}'}},
                     {"role": "function", "name": "f", "content": "done"}], ('"a"', "done")),
]  # fmt: skip
CALLS = [
    Row("function", [{"role": "assistant", "tool_calls": [_FUNCTION]}]),
    Row("custom", [{"role": "assistant", "tool_calls": [_CUSTOM]},
                   {"role": "tool", "tool_call_id": "c2", "content": "done"}],
        ("patch", "*** Begin", "done")),
]  # fmt: skip
ANSWER_PARTS = [
    Row("text", [_RIVER], ("river",)),
    Row("refusal", [{"type": "refusal", "refusal": "I will not."}], ("I will not.",)),
]
# Parts of what a user says to /v1/chat/completions: read whole, or refused.
USER_PARTS = {"text": True, "image_url": False, "input_audio": False, "file": False}
OLLAMA_FIELDS = ("role", "content", "thinking", "images", "tool_name", "tool_calls")


def types(*tables: list[Row]) -> set[str]:
    """The names of all types in tables."""
    return {kind for table in tables for row in table for kind in row.types.split()}
