"""shell-gpt: a question, and a chat with a second turn."""

import os
import subprocess

KNOWN = os.environ | {
    "API_BASE_URL": os.environ["RIDGELINE_URL"] + "/v1",
    "DEFAULT_MODEL": os.environ["RIDGELINE_MODEL"],
    "OPENAI_API_KEY": "x",
    "USE_LITELLM": "false",
    "OPENAI_USE_FUNCTIONS": "false",
    "PRETTIFY_MARKDOWN": "false",
}


def sgpt(*arguments):
    done = subprocess.run(
        ["sgpt", "--no-md", "--no-cache", *arguments],
        env=KNOWN,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_question_and_a_chat():
    assert sgpt("Name three colours.")
    assert sgpt("--chat", "c", "Hi")
    assert sgpt("--chat", "c", "More")
