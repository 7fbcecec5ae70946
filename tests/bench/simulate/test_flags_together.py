"""Flags of ``ridgeline simulate`` that say nothing beside others are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ridgeline.cli.main import app
from tests.model.cost.published_configs import PUBLISHED

RATE = ("--request-rate", "2")
PLAIN = ("--on", "l4", "--num-prompts", "3", "--num-warmups", "0")
LENGTHS = ("--prompt-tokens", "40", "--max-tokens", "4")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED["llama-3.1-8b"]["config"]))
    return str(path)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((*RATE, "--router", "prefix"), "--router .* give --replicas"),
        ((*RATE, "--load-per-server"), "--load-per-server .* give --replicas"),
        ((*RATE, "--back-after", "3"), "give --kills-per-minute"),
        ((*RATE, "--think-s", "3"), "give --turns"),
        ((*RATE, "--prompt-words", "9"), "--prompt-tokens and --prompt-words both"),
        ((*RATE, "--new-tokens", "9"), "--new-tokens and --max-tokens both"),
        (("--max-concurrency", "2", "--burstiness", "3"), "--burstiness .* give --request-rate"),
        ((*RATE, "--speculative-config", '{"method": "ngram"}'), "say with --drafts|--on"),
    ],
)
def test_what_would_be_ignored_is_refused(config: str, flags: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(app, ["simulate", config, *PLAIN, *LENGTHS, *flags])
    assert done.exit_code != 0
    with pytest.raises(Exception, match=reason):
        raise done.exception or AssertionError(done.output)


@pytest.mark.parametrize("flag", ["--prompt-words", "--prefix-share"])
def test_a_file_of_prompts_has_no_random_words(config: str, flag: str) -> None:
    load = ("--prompts", "there.txt", flag, "1")
    done = CliRunner().invoke(app, ["simulate", config, *PLAIN, *RATE, *load])
    assert f"{flag} is about random words" in str(done.exception)


def test_a_sweep_may_need_what_one_simulation_would_ignore(config: str) -> None:
    table = ("--set", "turns=1,2", "--think-s", "0.1", "--objective", "ttft:p95")
    done = CliRunner().invoke(app, ["sweep", config, *PLAIN, *LENGTHS, *RATE, *table])
    assert done.exit_code == 0, done.exception
