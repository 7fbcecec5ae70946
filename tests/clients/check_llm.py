"""llm, the command: prompts, a conversation, a schema."""

import os
import subprocess
from pathlib import Path

MODELS = """
- model_id: local
  model_name: {model}
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
- model_id: local-completion
  model_name: {model}
  api_base: {url}/v1
  completion: true
"""


def llm(*arguments):
    folder = Path.home() / "llm"
    folder.mkdir(exist_ok=True)
    names = {"model": os.environ["RIDGELINE_MODEL"], "url": os.environ["RIDGELINE_URL"]}
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(**names))
    known = os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "x"}
    done = subprocess.run(["llm", *arguments], env=known, capture_output=True, text=True, stdin=-3)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_prompts():
    assert llm("-m", "local", "Name three colours.", "-o", "max_tokens", "12").strip()
    assert llm("-m", "local", "Hi", "--no-stream", "-o", "max_tokens", "12").strip()
    assert llm("-c", "And one more?", "-o", "max_tokens", "12").strip()
    assert llm("-m", "local", "-s", "Be short.", "Hi", "-o", "max_tokens", "8").strip()
    assert llm("-m", "local-completion", "2+2=", "-o", "max_tokens", "4").strip()


def test_a_schema():
    """It leaves other keys free, so this small model may not come to an end."""
    said = llm("-m", "local", "--schema", "legs int", "A dog", "-o", "max_tokens", "40")
    assert said.lstrip().startswith("{")
