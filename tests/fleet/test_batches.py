"""Files and batches of a router: its lines go to the models that they name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import NotFoundError, OpenAI

from ridgeline.engine.setup.home import default_home
from tests.fleet.test_router import ASK, Routed, routing
from tests.own_home import own_home
from tests.serve.batches.test_batches import begun, counts, ended, line, lines_of
from tests.waiting import PATIENCE_S, eventually


@contextmanager
def kept(folder: Path, home: Path, *flags: str) -> Iterator[Routed]:
    """A router with a home of its own, where its files are; its kernels are everybody's."""
    with routing(folder, home / "log", *flags, **own_home(home, default_home())) as routed:
        yield routed


@contextmanager
def client_of(routed: Routed, key: str = "none") -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{routed.port}/v1", api_key=key) as client:
        yield client


def test_each_line_goes_to_the_model_that_it_names(folder: Path, tmp_path: Path) -> None:
    with kept(folder, tmp_path) as routed, client_of(routed) as client:
        lines = [
            *(line(f"{name}{i}", **ASK | {"model": name}) for i in range(3) for name in "ab"),
            line("seedless", model="a", prompt="one two", max_tokens=6),
            line("damaged", model="c", prompt="one two"),
            line("unknown", model="d", prompt="one two"),
            line("unnamed", prompt="one two"),
        ]
        batch = ended(client, begun(client, lines))
        assert (batch.status, counts(batch)) == ("completed", (10, 7, 3))
        answers = {one["custom_id"]: one["response"]["body"] for one in lines_of(
            client, batch.output_file_id
        )}  # fmt: skip
        alone = {name: routed.complete(name) for name in "ab"}
        for custom_id, body in answers.items():
            if custom_id != "seedless":
                assert (body["model"], body["choices"][0]["text"]) == (
                    custom_id[0],
                    alone[custom_id[0]],
                )
        wrong = {one["custom_id"]: one["response"] for one in lines_of(client, batch.error_file_id)}
        assert {name: one["body"]["error"]["code"] for name, one in wrong.items()} == {
            "damaged": "model_not_loaded",
            "unknown": "model_not_found",
            "unnamed": "missing_parameter",
        }


def test_a_key_has_its_own_and_its_batch_is_its_own_use(folder: Path, tmp_path: Path) -> None:
    """Though the router has only the keys' hashes, and the models check keys themselves."""
    keys = tmp_path / "keys"
    keys.write_text("anna a-key\nbert b-key\nboss o-key admin\n")
    with (
        kept(folder, tmp_path, "--api-key-file", str(keys)) as routed,
        client_of(routed, "a-key") as anna,
        client_of(routed, "b-key") as bert,
    ):
        batch = ended(anna, begun(anna, [line("one", model="a", prompt="one", max_tokens=5)]))
        assert counts(batch) == (1, 1, 0)
        said = '{"key":"x","seed":1,"created":"2026-01-01T00:00:00+00:00","journal":0,'
        said += '"batch":["key1",1]}'
        status, answer, _ = routed.call("/v1/completions", ASK, x_ridgeline_fleet=said)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), "who is no router"
        with pytest.raises(NotFoundError, match="there is no batch"):
            bert.batches.retrieve(batch.id)
        assert not list(bert.files.list())

        def used() -> bool:
            text = routed.call("/metrics", authorization="Bearer o-key")[1]
            found = [one for one in text.splitlines() if "key_prompt_tokens_total" in one]
            return any('key="anna"' in one and 'model_name="a"' in one for one in found)

        eventually(used)


def test_a_batch_goes_on_after_a_restart(folder: Path, tmp_path: Path) -> None:
    lines = [line(f"r{i}", model="a", prompt="one", max_tokens=60) for i in range(40)]
    with kept(folder, tmp_path) as routed, client_of(routed) as client:
        batch = begun(client, lines)
        eventually(lambda: counts(client.batches.retrieve(batch.id))[1] > 0)
        os.kill(routed.process.pid, signal.SIGTERM)
        assert routed.process.wait(PATIENCE_S) == 0
    with kept(folder, tmp_path) as routed, client_of(routed) as client:
        left = ended(client, batch)
        assert counts(left) == (40, 40, 0)
        answers = lines_of(client, left.output_file_id)
        assert [one["custom_id"] for one in answers] == [f"r{i}" for i in range(40)]
        assert len({one["id"] for one in answers}) == 40
