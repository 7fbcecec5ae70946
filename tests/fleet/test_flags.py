"""What one server takes, several take too: adapters, rules, names, traces, disks, limits."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ridgeline.fleet.servers.adapters import LOAD, UNLOAD
from ridgeline.system.machine import folder_name
from tests.fleet.test_remote_server import joined, key_file, names, url_of  # noqa: F401
from tests.fleet.test_replicas import WISH, answered, are_all_ready, fleet, streamed, table
from tests.fleet.test_router import ASK, Routed
from tests.lora import llama_shapes, random_pairs, write_peft
from tests.model.files.tiny import CONFIG
from tests.waiting import PATIENCE_S, eventually

BOSS, ANNA = {"authorization": "Bearer boss"}, {"authorization": "Bearer anna"}
FORBIDDEN = "e[a-z]{1,9}"  # which a random model often writes
RULES = """
version = "1"
[keys.default]
output = ["pii"]
limits = { requests_per_minute = 3 }
[rules.pii]
patterns = ["e[a-z]{1,9}"]
word = false
action = "redact"
"""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate("uvw"):
        write_peft(path / name, random_pairs(llama_shapes(CONFIG), 4, seed=i))
    return path


@pytest.fixture(scope="module")
def routed(
    folder: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Routed]:
    place = tmp_path_factory.mktemp("place")
    flags = ("--lora", f"u={adapters / 'u'}", "--allow-lora-loading", str(adapters))
    flags += ("--served-model-name", "main", "--served-model-name", "a")
    with fleet(folder, place / "log", *flags, "--trace", str(place / "t.jsonl")) as running:
        yield running


def said_by_all(routed: Routed, name: str, **fields: Any) -> set[Any]:
    """What the servers answer under a name, as status and text; each has a part of the requests."""

    def ask(_: int) -> tuple[int, str]:
        wish = ASK | {"model": name, "max_tokens": 40} | fields
        status, answer, _ = routed.call("/v1/completions", wish)
        return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["code"]

    with ThreadPoolExecutor(8) as pool:
        return set(pool.map(ask, range(16)))


def listed(routed: Routed) -> dict[str, Any]:
    return {one["id"]: one for one in routed.call("/v1/models")[1]["data"]}


def end_one(routed: Routed) -> None:
    """Kill a server, and wait for the one that follows it."""
    restarted = table(routed, "main")["restarted"]
    os.kill(table(routed, "main")["replicas"][0]["pid"], signal.SIGKILL)
    eventually(lambda: table(routed, "main")["restarted"] == restarted + 1)


def test_all_names_mean_the_model_and_answers_have_the_first(routed: Routed) -> None:
    assert (
        said_by_all(routed, "main") == said_by_all(routed, "a") == said_by_all(routed, "a:latest")
    )
    assert routed.call("/v1/completions", ASK | {"model": "a"})[1]["model"] == "main"
    assert set(listed(routed)) == {"main", "a", "u"}
    assert routed.call("/v1/completions", ASK | {"model": "other"})[0] == 404


def test_all_servers_have_an_adapter_and_a_stream_with_it_goes_on(routed: Routed) -> None:
    (plain,), (own,) = said_by_all(routed, "main"), said_by_all(routed, "u")
    assert plain != own
    shown = listed(routed)
    assert shown["u"]["parent"] == "main"
    assert shown["u"]["system_fingerprint"] != shown["main"]["system_fingerprint"]
    wish = WISH | {"model": "u"}
    whole = answered(routed, wish)
    eventually(lambda: are_all_ready(routed, "main"))
    ended = streamed(routed, lambda pid: os.kill(pid, signal.SIGKILL), wish=wish, name="main")
    assert ended == whole


def test_an_adapter_is_loaded_on_all_servers_and_on_those_that_follow(
    routed: Routed, adapters: Path
) -> None:
    eventually(lambda: are_all_ready(routed, "main"))
    wish = {"lora_name": "v", "lora_path": "v"}
    assert routed.call(LOAD, wish)[:2] == (200, "Success: LoRA adapter 'v' added successfully.")
    (first,) = said_by_all(routed, "v")
    assert first[0] == 200
    end_one(routed)
    assert said_by_all(routed, "v") == {first}
    status, answer, _ = routed.call(LOAD, wish)
    assert (status, "already" in answer["error"]["message"]) == (400, True)
    status, answer, _ = routed.call(LOAD, {"lora_name": "w", "lora_path": "../w"})
    assert (status, answer["error"]["code"]) == (403, "invalid_value")
    assert "w" not in listed(routed)
    assert routed.call(UNLOAD, {"lora_name": "u"})[0] == 200
    end_one(routed)  # which has it among its flags
    assert said_by_all(routed, "u") == {(404, "model_not_found")}
    assert said_by_all(routed, "v") == {first}


def test_each_server_has_a_trace_and_the_next_one_another(routed: Routed) -> None:
    end_one(routed)
    eventually(lambda: are_all_ready(routed, "main"))
    found = {path.name for path in routed.log_file.parent.glob("t-*.jsonl")}
    own = folder_name("main")
    assert {f"t-{own}-1.jsonl", f"t-{own}-2.jsonl", f"t-{own}-1-2.jsonl"} <= found


def test_a_rule_holds_where_a_stream_goes_on(folder: Path, tmp_path: Path) -> None:
    """What a server holds back follows from the tokens, so the next one holds back the same."""
    (rules := tmp_path / "rules.toml").write_text(RULES.replace("limits", "# limits"))
    flags = ("--rules", str(rules), "--kv-disk", f"{tmp_path / 'kv'}:64MiB", "--kv-disk-min", "16")
    with fleet(folder, tmp_path / "log", *flags) as routed:
        whole = answered(routed, WISH)
        assert sum(text.count("[PII]") for text, _ in whole.values()) > 100
        for _ in range(2):
            ended = streamed(routed, lambda pid: os.kill(pid, signal.SIGKILL))
            assert not any(re.search(FORBIDDEN, text) for text, _ in ended.values())
            assert ended == whole
            eventually(lambda: are_all_ready(routed))
        assert table(routed)["resumed"] == 2
        said_by_all(routed, "a", prompt="one two " * 16)
        for number in "12":
            metric = rf'kv_disk_blocks_total{{.*what="written".*replica="{number}"}} [1-9]'
            eventually(lambda metric=metric: re.search(metric, routed.call("/metrics")[1]))
        assert {path.name for path in (tmp_path / "kv").iterdir()} == {"server-1", "server-2"}


def test_a_key_gets_its_limit_once_however_many_servers_there_are(
    folder: Path,
    tmp_path: Path,
    key_file: Path,  # noqa: F811
) -> None:
    """Tokens and requests alike, also where a server is started again, or joins."""
    (keys := tmp_path / "keys").write_text("anna anna\nbert bert\nboss boss admin\n")
    (rules := tmp_path / "rules.toml").write_text(
        RULES.replace("[rules.", "[keys.anna]\nlimits = { tokens_per_day = 300 }\n[rules.", 1)
    )
    flags = ("--api-key-file", str(keys), "--rules", str(rules), "--max-tokens-per-minute", "9000")
    flags += ("--fleet-key-file", str(key_file))
    with fleet(folder, tmp_path / "log", *flags) as routed:
        bert = {"authorization": "Bearer bert"}
        body = ASK | {"model": "a", "max_tokens": 40, "prompt": "one two " * 3}
        with ThreadPoolExecutor(5) as pool:  # at once: in 20 s there would be another
            asked = [pool.submit(routed.call, "/v1/completions", body, **bert) for _ in range(5)]
        statuses = sorted(one.result()[0] for one in asked)
        assert statuses == [200, 200, 200, 429, 429], "of requests"
        used, statuses = 0, list[int]()
        for number in range(12):
            status, answer, headers = routed.call(
                "/v1/completions", body | {"stream": number % 2 == 1}, **ANNA
            )
            statuses.append(status)
            assert headers["x-ratelimit-limit-tokens"] == "9000"
            used += answer["usage"]["total_tokens"] if status == 200 and number % 2 == 0 else 0
            if number == 2:
                with_key = routed.call("/v1/fleet", **BOSS)[1]["models"]["a"]["replicas"]
                os.kill(with_key[0]["pid"], signal.SIGKILL)
        num_served = statuses.count(200)
        assert statuses == [200] * num_served + [429] * (12 - num_served)
        each = used / (num_served - num_served // 2)
        assert 300 - each < num_served * each < 300 + each, "a day's, and the debt of the last"
        other = joined(folder / "a", key_file, url_of(routed), *flags[:2], waits=False)
        with other as process:
            assert process.wait(PATIENCE_S) == 1
            assert process.stderr is not None
            assert "its answers would not be the same" in process.stderr.read()
        with joined(folder / "a", key_file, url_of(routed), *flags[:4]):
            statuses = [routed.call("/v1/completions", body, **ANNA)[0] for _ in range(3)]
            assert 429 in statuses, "another server brings no further tokens"
