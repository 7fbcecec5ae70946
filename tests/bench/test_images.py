"""``ridgeline bench images`` against a real HTTP server that makes real images, and broken ones."""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.bench.images import Slice, image_size, parse_slice, plan_slices
from tests.bench.script_server import JSON, serving
from tests.waiting import PATIENCE_S


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    rows = b"".join(b"\0" + bytes((x + y) % 256 for x in range(width)) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def jpeg(width: int, height: int, frame: int = 0xC2) -> bytes:
    """The segments of a JPEG, with a thumbnail's frame inside a comment that must not count."""
    comment = b"\xff\xc0\x00\x0b\x08\x00\x01\x00\x01"
    size = struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\x00"
    return (
        b"\xff\xd8"
        + (b"\xff\xfe" + struct.pack(">H", 2 + len(comment)) + comment)
        + (b"\xff\xff" + bytes([frame]) + struct.pack(">H", 2 + len(size)) + size)
        + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00abc\xff\xd9"
    )


def webp(width: int, height: int, kind: bytes) -> bytes:
    body = {
        b"VP8X": b"\0" * 4 + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little"),
        b"VP8L": b"\x2f" + struct.pack("<I", (width - 1) | ((height - 1) << 14)),
        b"VP8 ": b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height),
    }[kind]
    body += b"\0" * (len(body) % 2)
    data = b"WEBP" + kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(data)) + data


# --- sizes ---------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40))


@given(SIZES, st.data())
def test_sizes_of_complete_images_are_read_and_cut_ones_are_errors(
    size: tuple[int, int], data: st.DataObject
) -> None:
    kinds = {
        "png": [png(*size)],
        "jpeg": [jpeg(*size), jpeg(*size, frame=0xC0)],
        "webp": [webp(*size, kind) for kind in (b"VP8X", b"VP8L", b"VP8 ")],
    }
    for kind, images in kinds.items():
        for image in images:
            assert image_size(image) == (kind, *size)
            cut = data.draw(st.integers(0, len(image) - 1))
            with pytest.raises(ValueError, match=r"cut off|no PNG|no end|no frame"):
                image_size(image[:cut])


def test_large_sizes() -> None:
    assert image_size(webp(16384, 16000, b"VP8L")) == ("webp", 16384, 16000)
    assert image_size(webp(65535, 3, b"VP8X")) == ("webp", 65535, 3)
    assert image_size(jpeg(40000, 65535)) == ("jpeg", 40000, 65535)


def test_damage_within_a_png_is_found() -> None:
    image = bytearray(png(20, 20))
    image[50] ^= 1
    with pytest.raises(ValueError, match="is damaged"):
        image_size(bytes(image))


@pytest.mark.parametrize("data", [b"", b"GIF89a" + b"\0" * 40, b"<html>not found</html>"])
def test_what_is_no_image(data: bytes) -> None:
    with pytest.raises(ValueError, match="no PNG, JPEG or WebP"):
        image_size(data)


# --- the command ---------------------------------------------------------------------------------


def answer(*images: bytes) -> tuple[int, str]:
    data = [{"b64_json": base64.b64encode(image).decode()} for image in images]
    return 200, json.dumps({"created": 1, "data": data})


def bench_images(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "ridgeline"), "bench", "images", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_images_are_counted_and_timed(tmp_path: Path) -> None:
    all_three = threading.Barrier(3)

    def script(number: int, body: JSON) -> Iterator[Any]:
        if number in (2, 3, 4):  # the first behind two warm-ups
            all_three.wait(PATIENCE_S)
        time.sleep(0.1)
        yield answer(png(32, 16), jpeg(32, 16))

    table = tmp_path / "result.md"
    with serving(script) as server:
        done = bench_images(
            *("--base-url", server.url + "/v1", "--model", "sdxl", "--size", "32x16", "--n", "2"),
            *("--steps", "4", "--guidance", "7.5", "--max-concurrency", "3", "--num-prompts", "9"),
            *("--num-warmups", "2", "--seed", "11", "--extra-body", '{"quality": "low"}'),
            *("--out", str(table)),
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["num_successful"], found["num_images"]) == (9, 18)
    assert found["latency"]["min_ms"] >= 100
    assert found["seconds_per_image"] == pytest.approx(found["latency"]["mean_ms"] / 2e3, abs=1e-3)
    assert found["seconds_per_step"] == pytest.approx(found["latency"]["mean_ms"] / 4e3, abs=1e-3)
    assert found["images_per_s"] == pytest.approx(18 / found["duration_s"], rel=0.01)
    assert found["images_per_s"] < 3 * 2 / 0.1
    assert server.peak == 3
    assert set(server.paths) == {"/v1/images/generations"}
    body = server.bodies[-1]
    assert {**body, "prompt": "", "seed": 0} == {
        "model": "sdxl", "prompt": "", "n": 2, "size": "32x16", "num_inference_steps": 4,
        "guidance_scale": 7.5, "response_format": "b64_json", "seed": 0, "quality": "low",
    }  # fmt: skip
    assert len({body["seed"] for body in server.bodies}) == 11
    assert "Image throughput (images/s):" in done.stdout
    assert table.read_text().startswith("| num_requests |")


def failing(number: int, body: JSON) -> Iterator[Any]:
    good = png(8, 8)
    yield [
        answer(good),
        answer(png(8, 9)),
        answer(good[:-20]),
        answer(good, good),
        answer(b"<svg/>"),
        (500, json.dumps({"error": {"message": "out of memory"}})),
        (200, json.dumps({"data": [{"b64_json": "?!"}]})),
        (200, json.dumps({"images": []})),
    ][number % 8]


def test_only_whole_images_of_the_asked_size_count() -> None:
    with serving(failing) as server:
        done = bench_images(
            *("--base-url", server.url, "--size", "8x8", "--num-warmups", "0"),
            *("--max-concurrency", "1", "--num-prompts", "16"),
        )
    assert done.returncode == 0
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["num_successful"], found["num_failed"], found["num_images"]) == (2, 14, 2)
    assert sorted(failure["error"] for failure in found["failures"]) == [
        "2 images, where 1 were asked for",
        "6 bytes that are no PNG, JPEG or WebP image",
        "HTTP 500: out of memory",
        "a png of 8x9, where 8x8 was asked for",
        "an image is not base64: Only base64 data is allowed",
        'the answer has no "data" with "b64_json" or "url"',
        f"the image is cut off after {len(png(8, 8)) - 20} bytes",
    ]
    assert "failed: 2 x HTTP 500: out of memory" in done.stderr
    assert "warning: 14 of 16 requests failed" in done.stderr


def test_images_by_url_are_fetched_and_a_plan_for_slices_is_made(tmp_path: Path) -> None:
    whole, plan = tmp_path / "whole.json", tmp_path / "plan.csv"

    def script(number: int, body: JSON) -> Iterator[Any]:
        path = "/image.png" if number < 12 else "/lost.png"
        yield 200, json.dumps({"data": [{"url": server.url + path}]})

    flags = ("--size", "8x8", "--response-format", "url", "--request-rate", "inf")
    flags += ("--num-prompts", "6", "--num-warmups", "0")
    with serving(script) as server:
        server.files["/image.png"] = png(8, 8)
        flags += ("--base-url", server.url)
        first = bench_images(*flags, "--slices", "7/7")
        whole.write_text(first.stdout)
        second = bench_images(
            *flags, "--slices", "2/7", "--measured", str(whole), "--out", str(plan)
        )
        third = bench_images(*flags)
    assert third.returncode == 1
    assert "404" in third.stderr
    rows = {row["slice"]: row for row in json.loads(second.stdout.splitlines()[-1])["slices"]}
    assert (
        rows["7/7"]["images_per_s_of_card"]
        == json.loads(first.stdout.splitlines()[-1])["images_per_s"]
    )
    assert (rows["7/7"]["source"], rows["2/7"]["source"]) == ("measured", "measured")
    assert rows["1/7"]["source"] == "assumed from 2/7"
    assert plan.read_text().startswith("slice,per_card,")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "8"], "--size 8 is not like 1024x1024"),
        (["--n", "0"], "--n is 0"),
        (["--slices", "8/7"], "--slices 8/7 is not a part"),
        (["--measured", "x.json"], "say with --slices"),
        (["--out", "x.svg"], "--out x.svg: its ending says what to write: .csv, .md"),
        (["--extra-body", "[]"], "--extra-body [] is not a JSON object"),
    ],
)
def test_flags_that_make_no_sense(arguments: list[str], words: str) -> None:
    done = bench_images("--base-url", "http://127.0.0.1:9", "--max-concurrency", "1", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_file_that_no_run_wrote_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    done = bench_images(
        *("--base-url", "http://127.0.0.1:9", "--max-concurrency", "1"),
        *("--slices", "1/7", "--measured", str(path)),
    )
    assert done.returncode == 1
    assert f"{path}: expected the JSON of ridgeline bench images" in done.stderr


# --- slices --------------------------------------------------------------------------------------


def test_what_was_not_measured_goes_with_the_part_of_the_compute() -> None:
    rows = {row["slice"]: row for row in plan_slices([Slice(2, 7, 0.5, 4.0)])}
    assert list(rows) == ["1/7", "2/7", "3/7", "4/7", "7/7"]
    assert [row["per_card"] for row in rows.values()] == [7, 3, 2, 1, 1]
    assert rows["2/7"]["images_per_s_of_card"] == 1.5
    assert rows["7/7"]["images_per_s_of_card"] == 1.75
    assert rows["2/7"]["ratio_to_whole_card"] == pytest.approx(6 / 7, abs=1e-3)  # 1/7 lies idle
    assert rows["7/7"]["seconds_per_image"] == pytest.approx(8 / 7, abs=1e-3)
    assert rows["1/7"]["seconds_per_image"] == 8.0


def test_a_measurement_of_the_whole_card_replaces_the_assumption() -> None:
    rows = {r["slice"]: r for r in plan_slices([Slice(1, 7, 0.3, 3.0), Slice(1, 1, 1.5, 0.7)])}
    assert rows["7/7"]["images_per_s_of_card"] == 1.5
    assert rows["1/7"]["ratio_to_whole_card"] == pytest.approx(2.1 / 1.5)
    assert rows["4/7"]["source"] == "assumed from 1/7"
    assert rows["4/7"]["images_per_s_of_each"] == pytest.approx(1.2)


def test_runs_of_different_cards_make_no_plan() -> None:
    with pytest.raises(ValueError, match="one kind of card"):
        plan_slices([Slice(1, 7, 1.0, 1.0), Slice(1, 4, 1.0, 1.0)])


@pytest.mark.parametrize("text", ["", "2", "0/7", "8/7", "a/b", "2/7/9"])
def test_a_part_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a part of a card"):
        parse_slice(text)
