"""Files and batches as OpenAI's client uses them: per key, across restarts, giving way."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import (
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    NotFoundError,
    OpenAI,
)
from openai.types import Batch

from ridgeline.serve.batches import runner as background
from tests.serve.serving import Served, hold, serving
from tests.waiting import PATIENCE_S, eventually

URL = "/v1/completions"


@pytest.fixture
def kept(model: Path, tmp_path: Path) -> Iterator[Served]:
    with serving(model, {"max_num_seqs": 4}, home=tmp_path) as served:
        yield served
        served.assert_idle()


def line(custom_id: str, url: str = URL, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def requests(num: int, max_tokens: int = 8) -> list[str]:
    return [line(f"r{i}", prompt=f"Once {i}", max_tokens=max_tokens) for i in range(num)]


def uploaded(client: OpenAI, lines: list[str]) -> str:
    content = ("mine.jsonl", "\n".join(lines).encode())
    return client.files.create(file=content, purpose="batch").id


def begun(client: OpenAI, lines: list[str], **options: Any) -> Batch:
    file_id, day = uploaded(client, lines), "24h"
    return client.batches.create(
        input_file_id=file_id,
        endpoint="/v1/completions",
        completion_window=day,  # type: ignore[arg-type]
        **options,
    )


def ended(client: OpenAI, batch: Batch) -> Batch:
    over = ("completed", "failed", "cancelled")
    eventually(lambda: client.batches.retrieve(batch.id).status in over)
    return client.batches.retrieve(batch.id)


def lines_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def counts(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    found = batch.request_counts
    return found.total, found.completed, found.failed


def test_a_file_can_be_kept_read_listed_and_deleted(kept: Served) -> None:
    client = kept.client()
    content = "\n".join(requests(3))
    file = client.files.create(file=("mine.jsonl", content.encode()), purpose="batch")
    assert (file.object, file.filename, file.bytes) == ("file", "mine.jsonl", len(content))
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).text == content
    other = client.files.create(file=("other.jsonl", b"{}"), purpose="batch")
    assert [one.id for one in client.files.list()] == [other.id, file.id]
    assert [one.id for one in client.files.list(order="asc", limit=1)] == [file.id, other.id]
    assert not list(client.files.list(purpose="batch_output"))
    assert client.files.delete(file.id).deleted
    with pytest.raises(NotFoundError, match="there is no file"):
        client.files.content(file.id)
    assert [one.id for one in client.files.list()] == [other.id]


def test_a_batch_is_answered_by_the_routes_and_bad_lines_have_a_file(kept: Served) -> None:
    client = kept.client()
    lines = [
        *requests(3),
        "nonsense",
        line("long", prompt="word " * 5000),
        line("elsewhere", "/v1/embeddings", input="a"),
        line("seeded", prompt="Once 1", max_tokens=8, seed=4),
    ]
    batch = ended(client, begun(client, lines, metadata={"job": "nightly"}))
    assert batch.status == "completed"
    assert counts(batch) == (7, 4, 3)
    assert batch.metadata == {"job": "nightly"}
    assert batch.in_progress_at
    assert batch.completed_at
    answers = lines_of(client, batch.output_file_id)
    assert [one["custom_id"] for one in answers] == ["r0", "r1", "r2", "seeded"]
    alone = client.completions.create(model="tiny", prompt="Once 1", max_tokens=8, seed=4)
    in_batch = answers[3]["response"]["body"]
    assert in_batch["choices"][0]["text"] == alone.choices[0].text
    assert in_batch["usage"]["completion_tokens"] == 8
    used = [one["response"]["body"]["usage"] for one in answers]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(one["prompt_tokens"] for one in used) > 0
    assert batch.usage.output_tokens == sum(one["completion_tokens"] for one in used)
    assert batch.usage.total_tokens == sum(one["total_tokens"] for one in used)
    wrong = lines_of(client, batch.error_file_id)
    assert "it is not JSON" in wrong[0]["error"]["message"]
    assert wrong[1]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert "all requests of this batch go to /v1/completions" in wrong[2]["error"]["message"]
    output = client.files.retrieve(str(batch.output_file_id))
    assert output.purpose == "batch_output"
    assert [one.id for one in client.batches.list()] == [batch.id]


def test_a_batch_without_a_bad_line_has_no_file_of_errors(kept: Served) -> None:
    client = kept.client()
    batch = ended(client, begun(client, requests(1)))
    assert (batch.status, batch.error_file_id) == ("completed", None)


def test_a_batch_without_an_answer_has_no_file_of_answers(kept: Served) -> None:
    client = kept.client()
    batch = ended(client, begun(client, [line(one, prompt="a", temperature=999) for one in "ab"]))
    assert (batch.status, counts(batch), batch.output_file_id) == ("completed", (2, 0, 2), None)
    assert len(lines_of(client, batch.error_file_id)) == 2
    assert batch.usage is not None
    assert batch.usage.total_tokens == 0
    assert [one.filename for one in client.files.list(purpose="batch_output")] == [
        f"{batch.id}_error.jsonl"
    ]


def test_an_empty_file_is_a_batch_that_failed(kept: Served) -> None:
    client = kept.client()
    batch = ended(client, begun(client, ["", " "]))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [one.message for one in batch.errors.data or ()] == ["the file has no requests"]


def test_who_cancels_gets_what_was_answered(kept: Served) -> None:
    client = kept.client()
    go_on = hold(kept, after=14)
    batch = begun(client, requests(40, max_tokens=4))
    eventually(lambda: counts(client.batches.retrieve(batch.id))[1] > 0)
    with pytest.raises(ConflictError, match="reads this file"):
        client.files.delete(batch.input_file_id)
    second = begun(client, requests(1))
    assert client.batches.cancel(second.id).status == "cancelled"  # it had not begun
    assert client.batches.cancel(batch.id).status == "cancelling"
    go_on.set()
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    total, completed, failed = counts(batch)
    assert (total, failed) == (40, 0)
    assert 0 < completed < 40
    assert len(lines_of(client, batch.output_file_id)) == completed
    with pytest.raises(ConflictError, match="is over: it is cancelled"):
        client.batches.cancel(batch.id)


def answers_of(client: OpenAI, batch: Batch) -> list[tuple[str, str]]:
    lines = lines_of(client, batch.output_file_id)
    return [(one["custom_id"], one["response"]["body"]["choices"][0]["text"]) for one in lines]


def test_a_batch_goes_on_after_a_restart_as_if_there_had_been_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers have chance in them, which depends on the batch alone."""
    monkeypatch.setattr(background.secrets, "randbits", lambda num_bits: 5)
    with serving(model, {"max_num_seqs": 4}, home=tmp_path) as served:
        client = served.client()
        go_on = hold(served, after=30)
        batch = begun(client, requests(30))
        eventually(lambda: counts(client.batches.retrieve(batch.id))[1] > 3)
        served.loop.call_soon_threadsafe(served.running.stop)
        go_on.set()
        served.thread.join(PATIENCE_S)
    (record,) = tmp_path.glob("batches/*/*/batch_*.json")
    assert json.loads(record.read_text())["status"] == "in_progress"
    with serving(model, {"max_num_seqs": 4, "seed": 99}, home=tmp_path) as served:
        client = served.client()
        broken = ended(client, batch)
        assert (broken.status, counts(broken)) == ("completed", (30, 30, 0))
        whole = ended(client, begun(client, requests(30)))
        answers = answers_of(client, broken)
        assert answers == answers_of(client, whole)
        assert [name for name, _ in answers] == [f"r{i}" for i in range(30)]
        assert len({text for _, text in answers}) > 20
    assert not list(tmp_path.glob("batches/*/*/*.part*"))


def test_a_key_sees_its_own_and_no_others(model: Path, tmp_path: Path) -> None:
    with serving(model, home=tmp_path, api_key=["one", "two"]) as served:
        mine, others = served.client("one"), served.client("two")
        batch = ended(mine, begun(mine, requests(1)))
        assert batch.output_file_id
        for client_error, call in (
            (NotFoundError, lambda: others.files.retrieve(batch.input_file_id)),
            (NotFoundError, lambda: others.files.content(str(batch.output_file_id))),
            (NotFoundError, lambda: others.files.delete(batch.input_file_id)),
            (NotFoundError, lambda: others.batches.retrieve(batch.id)),
            (NotFoundError, lambda: others.batches.cancel(batch.id)),
            (AuthenticationError, lambda: served.client("three").batches.retrieve(batch.id)),
        ):
            with pytest.raises(client_error):
                call()
        assert not list(others.files.list())
        assert not list(others.batches.list())
        with pytest.raises(NotFoundError):
            others.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/completions",
                completion_window="24h",
            )
    with serving(model, home=tmp_path, api_key=["two", "one"]) as served:  # labels change places
        assert served.client("one").batches.retrieve(batch.id).id == batch.id
        assert not list(served.client("two").batches.list())


def test_paths_in_ids_lead_nowhere(kept: Served) -> None:
    uploaded(kept.client(), requests(1))
    for path in ("/v1/files/..%2F.lock", "/v1/files/..%2F..%2F..%2Fetc%2Fpasswd/content"):
        assert kept.call(path)[0] == 404


def test_sizes_are_bounded(model: Path, tmp_path: Path) -> None:
    with serving(model, home=tmp_path, max_file="64KiB", max_stored="100KiB") as served:
        client = served.client()
        for size in (70_000, 200_000):
            with pytest.raises(APIStatusError, match="--max-file") as caught:
                client.files.create(file=("a", b"x" * size), purpose="batch")
            assert caught.value.status_code == 413
        client.files.create(file=("a", b"x" * 60_000), purpose="batch")
        with pytest.raises(APIStatusError, match="--max-stored"):
            client.files.create(file=("a", b"x" * 60_000), purpose="batch")
        assert len(list(client.files.list())) == 1
        assert not list(tmp_path.glob("**/*.writing"))


def test_what_is_wrong_is_named(kept: Served) -> None:
    client = kept.client()
    with pytest.raises(BadRequestError, match="purpose is 'vision'"):
        client.files.create(file=b"x", purpose="vision")
    file_id = uploaded(client, requests(1))
    body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
    for change, reason in (
        ({"endpoint": "/v1/audio"}, "endpoint is not a route for batches"),
        ({"input_file_id": None}, "input_file_id is missing"),
        ({"metadata": {"a": 1}}, "metadata"),
    ):
        status, error = kept.refused("/v1/batches", body | change)
        assert (status, reason in error["message"]) == (400, True), error
    assert kept.call("/v1/files?limit=0")[0] == 400
    assert kept.call("/v1/files?order=up")[0] == 400
    assert kept.call("/v1/files?after=file-x")[0] == 404
    assert kept.call("/v1/files", b"{}")[0] == 415
    form = {"content_type": "multipart/form-data; boundary=x"}
    assert kept.call("/v1/files", b"nonsense", **form)[0] == 400
    assert (
        kept.call("/v1/batches", body | {"output_expires_after": {}})[2]["x-ridgeline-ignored"]
        == "output_expires_after"
    )


def test_where_nothing_can_be_kept_that_is_said(model: Path, tmp_path: Path) -> None:
    with serving(model) as served:
        status, answer, _ = served.call("/v1/files")
        assert (status, answer["error"]["message"]) == (503, "this server keeps no files")
    with serving(model, home=tmp_path), serving(model, home=tmp_path) as second:
        status, answer, _ = second.call("/v1/batches")
        assert status == 503
        assert "another server of this model keeps the files" in answer["error"]["message"]


def test_who_waits_goes_before_a_batch_which_goes_on_afterwards(kept: Served) -> None:
    """While somebody waits, no step has a sequence of the batch in it."""
    client, is_asked = kept.client(), kept.valve.gate()
    seen: list[set[str]] = []
    engine = kept.llm.engine

    def note(step: Any) -> None:
        names = {engine.requests[work.seq_id[0]].name for work in step.work}
        seen.append({"batch" if name.startswith("batch-") else "person" for name in names})
        if len(seen) == 40:  # of about 90: some are answered, and the person comes now
            is_asked.wait(PATIENCE_S)

    kept.valve.before = note
    batch = begun(client, requests(12, max_tokens=30))
    eventually(lambda: counts(client.batches.retrieve(batch.id))[1] > 0)
    with ThreadPoolExecutor(1) as pool:
        ask, streams = client.completions.create, kept.running.async_engine._streams
        asked = pool.submit(ask, model="tiny", prompt="Hello", max_tokens=20)
        eventually(lambda: not all(one.name.startswith("batch-") for one in [*streams]))
        is_asked.set()
        answer = asked.result()
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    eventually(lambda: seen[-1] == {"batch"})
    first = seen.index({"person"})
    assert seen[:first] == [{"batch"}] * first  # the batch ran when the person came
    assert {"person"} in seen
    assert {"person", "batch"} not in seen
    kept.valve.before = lambda step: None
    done = ended(client, batch)
    assert counts(done) == (12, 12, 0)


def test_batches_of_keys_share_what_nobody_waits_for(model: Path, tmp_path: Path) -> None:
    """A key with a long batch does not keep another's short one waiting to its end."""
    with serving(model, {"max_num_seqs": 2}, home=tmp_path, api_key=["one", "two"]) as served:
        mine, others = served.client("one"), served.client("two")
        go_on = hold(served, after=600)  # of 800: there it waits for the short one
        long = begun(mine, requests(200, max_tokens=8))
        eventually(lambda: counts(mine.batches.retrieve(long.id))[1] > 0)
        short = ended(others, begun(others, requests(3)))
        assert short.status == "completed"
        assert mine.batches.retrieve(long.id).status == "in_progress"
        mine.batches.cancel(long.id)
        go_on.set()
        assert ended(mine, long).status == "cancelled"


def test_two_people_and_a_batch_leave_nothing_behind(kept: Served) -> None:
    client = kept.client()
    batch = begun(client, requests(20))

    def ask(prompt: str) -> None:
        client.completions.create(model="tiny", prompt=prompt, max_tokens=6)

    work: list[Callable[[], None]] = [lambda i=i: ask(f"word {i}") for i in range(8)]  # type: ignore[misc]
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(ended(client, batch)) == (20, 20, 0)
