"""gradio: its chat over a server, as its page asks it."""

import os

import gradio


def test_a_chat():
    chat = gradio.load_chat(
        os.environ["RIDGELINE_URL"] + "/v1/", model=os.environ["RIDGELINE_MODEL"], token="x"
    )
    parts = [*chat.fn("Say hi.", [])]
    assert parts[-1].startswith(parts[0])
    said = [("user", "Hi"), ("assistant", "Hello.")]
    turns = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said]
    assert [*chat.fn("Say bye.", turns)][-1]
