"""Notices of three clouds: found, not mistaken, and asked for again after nonsense."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from ridgeline.serve.tunnel import spot
from ridgeline.serve.tunnel.spot import URL, Notice, notice_of
from tests.serve.tunnel.clouds import Cloud, serving_cloud
from tests.waiting import PATIENCE_S, free_port

NOTICES = {"aws": 120.0, "azure": 45.0, "gcp": 30.0}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot, "_LOOK_S", 0.01)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which is not asked


async def asked_again(cloud: Cloud) -> None:
    await asyncio.to_thread(cloud.wait_asked, 2)


@pytest.mark.parametrize("name", NOTICES)
@pytest.mark.parametrize("is_named", [True, False])
def test_a_notice_is_found_when_there_is_one(
    name: str, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    async def watch(cloud: Cloud) -> Notice:
        waiting = asyncio.ensure_future(notice_of(name if is_named else "auto", said.append))
        await asked_again(cloud)
        for nonsense in ("", "[]", "null", '{"Events": [{"EventType": "Preempt"}]}', "<html>"):
            cloud.says = nonsense
            await asked_again(cloud)
            assert not waiting.done(), nonsense
        cloud.says = None
        await asked_again(cloud)
        cloud.resources, cloud.left_s = ["another_1"], NOTICES[name]
        if name == "azure":
            await asked_again(cloud)
            assert not waiting.done(), "it is about another machine"
        cloud.resources = ["another_1", "ridgeline_3"]
        return await waiting

    with serving_cloud(name) as cloud:
        monkeypatch.setenv(URL, cloud.url)
        found = asyncio.run(watch(cloud))
    assert found.cloud == name
    assert NOTICES[name] - 30 <= found.left_s <= NOTICES[name]
    assert said == []


@pytest.mark.parametrize("asked", ["auto", "azure"])
def test_where_nobody_answers_it_is_said_once(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv(URL, url)
    said: list[str] = []
    ask = spot._ask

    async def watch() -> None:
        has_said, answers = asyncio.Event(), asyncio.Queue[object]()

        async def noted(client: httpx2.AsyncClient, cloud: str) -> float | Exception | None:
            answers.put_nowait(answer := await ask(client, cloud))
            return answer

        def write(line: str) -> None:
            said.append(line)
            has_said.set()

        monkeypatch.setattr(spot, "_ask", noted)
        waiting = asyncio.ensure_future(notice_of(asked, write))
        await asyncio.wait_for(has_said.wait(), PATIENCE_S)
        for _ in range(3):  # one of each cloud; or one, and more after it was said
            await asyncio.wait_for(answers.get(), PATIENCE_S)
        for _ in range(20):  # whatever could go on goes on
            await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(watch())
    names = "AWS, Azure or GCP" if asked == "auto" else asked
    assert said == [
        f"--spot {asked}: no metadata service of {names} answers at {url}, so no notice can arrive"
    ]
