"""``ridgeline bench images``: the load of many users on an endpoint that makes images.

It knows a server only by its URL, as OpenAI's images API. Only images that are complete and of the
size that was asked for count. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import re
import secrets
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from ridgeline.bench.load.client_flags import Failed, check_base_url, headers_of, read_extra_body
from ridgeline.bench.load.main import print_troubles, read_plan
from ridgeline.bench.load.stats import Outcome, client_warnings, failures, summary_ms
from ridgeline.bench.out_file import check_out, write_out
from ridgeline.engine.setup.options import flag_field
from ridgeline.engine.setup.progress import count_bar, say
from ridgeline.foresight.simulator.workload import Planned, Workload
from ridgeline.system.report import Table, figure, flat
from ridgeline.system.terminal import drawn

if TYPE_CHECKING:
    import httpx2

    from ridgeline.bench.load.client import Reader

DEFINITIONS = {
    "latency": "the last byte of the answer, and of the image where it comes by URL, - send",
    "seconds_per_image": "per request: latency / images of the request",
    "seconds_per_step": "per request: latency / steps; null where --steps is not given",
    "images_per_s": "images of successful requests / duration_s, which is from the start until the "
    "last request ended",
    "success": "status 200, as many images as asked for, each a complete PNG, JPEG or WebP of the "
    "size asked for",
}


@dataclass(frozen=True, kw_only=True)
class Images:
    """Whom to ask for which images; each field is a flag of the command line."""

    base_url: str = flag_field(
        MISSING, "Address of the server, such as http://127.0.0.1:8000, with or without /v1."
    )
    model: str | None = flag_field(None, "Name of the model in requests.")
    api_key: str | None = flag_field(None, "Bearer token.", envvar="OPENAI_API_KEY")
    size: str = flag_field("1024x1024", "WIDTHxHEIGHT in pixels.")
    n: int = flag_field(1, "Number of images in a request.")
    steps: int | None = flag_field(None, "num_inference_steps. Default: the server's.")
    guidance: float | None = flag_field(None, "guidance_scale. Default: the server's.")
    response_format: Literal["b64_json", "url"] = flag_field("b64_json", "How images are returned.")
    extra_body: str = flag_field("{}", "JSON fields to add to requests; null removes one.")
    timeout_s: float = flag_field(600.0, "Longer requests count as failed.")
    slices: str | None = flag_field(
        None, "The run is on a slice of a GPU, such as 2/7: compare all slices of the GPU."
    )
    measured: list[Path] | None = flag_field(
        None, "With --slices: the JSON of earlier runs, on other slices or the whole GPU."
    )
    out: Path | None = flag_field(
        None, "Write the result, or the comparison of slices, to this .csv or .md file."
    )

    def __post_init__(self) -> None:
        """Raise ValueError for flags that are wrong with any server."""
        check_base_url(self.base_url)
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", self.size):
            raise ValueError(f"--size {self.size} is not like 1024x1024")
        for name in ("n", "steps", "timeout_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
        if self.measured and not self.slices:
            raise ValueError("--measured is for a plan: say with --slices what this run is on")
        if self.slices is not None:
            parse_slice(self.slices)
        check_out(self.out, (".csv", ".md"))
        read_extra_body(self.extra_body)


@dataclass(frozen=True, slots=True)
class ImagesTarget:
    """Where requests for images go, and what all have in common; it is an ``Endpoint``."""

    url: str
    headers: Mapping[str, str]
    fields: Mapping[str, Any]
    timeout_s: float
    seed: int

    def body(self, planned: Planned, said: Sequence[tuple[str, str]] = ()) -> bytes:
        """Return the JSON of a request; fields that are None are left out."""
        own = {"prompt": planned.prompt, "seed": self.seed + planned.index}
        fields = own | dict(self.fields)
        return json.dumps({name: v for name, v in fields.items() if v is not None}).encode()


def target_of(images: Images, seed: int) -> ImagesTarget:
    """Return whom to ask for which images; the request of index i has the seed ``seed + i``."""
    return ImagesTarget(
        url=images.base_url.rstrip("/").removesuffix("/v1") + "/v1/images/generations",
        headers=headers_of(images.api_key),
        fields={
            "model": images.model,
            "n": images.n,
            "size": images.size,
            "num_inference_steps": images.steps,
            "guidance_scale": images.guidance,
            "response_format": images.response_format,
        }
        | read_extra_body(images.extra_body),
        timeout_s=images.timeout_s,
        seed=seed,
    )


def bench_images(images: Images, load: Workload) -> bool:
    """Measure; print the result and the JSON document. False if no request succeeded.

    Raises ValueError if a file is not what it should be, or no warm-up request succeeds.
    """
    from ridgeline.bench.load.client import drive

    load = replace(load, seed=secrets.randbits(31) if load.seed is None else load.seed)
    planned, _ = read_plan(load)
    others = [_read_measured(path) for path in images.measured or ()]
    target, read = target_of(images, load.seed or 0), make_reader(images)
    warmups, measured = planned[: load.num_warmups], planned[load.num_warmups :]
    with count_bar("Asking", note="requests") as report:
        outcomes, client = asyncio.run(
            drive(target, warmups, measured, load.max_concurrency, report, read=read)
        )
    summary = summarise_images(outcomes, images.n, images.steps)
    said = client_warnings(client)
    if summary["num_failed"]:
        said.append(f"{summary['num_failed']} of {summary['num_requests']} requests failed")
    plan = None
    if images.slices and summary["num_successful"]:
        measures = summary["images_per_s"], summary["seconds_per_image"]
        plan = plan_slices([Slice(*parse_slice(images.slices), *measures), *others])
    _print(summary, plan, said)
    if images.out:
        write_out(images.out, plan or [flat(summary)], "")
        say(f"written: {images.out}")
    flags = {
        name: str(v) if isinstance(v, Path) or v == math.inf else v
        for name, v in (asdict(images) | asdict(load)).items()
        if name not in ("api_key", "measured")
    }
    notes = {"slices": plan, "client": client, "warnings": said, "definitions": DEFINITIONS}
    print(json.dumps({"flags": flags} | summary | notes, allow_nan=False))
    return bool(summary["num_successful"])


def make_reader(options: Images) -> Reader:
    """Return what reads an answer, and raises Failed unless its images are what was asked for."""
    num = options.n
    width, height = map(int, options.size.split("x"))

    async def read(
        http: httpx2.AsyncClient, response: httpx2.Response, outcome: Outcome, start_s: float
    ) -> None:
        body = await response.aread()
        outcome.end_s = time.perf_counter() - start_s
        images = _images(body)
        if len(images) != num:
            raise Failed(f"{len(images)} images, where {num} were asked for")
        for image in images:
            if isinstance(image, str):
                image = (await http.get(image)).raise_for_status().content
                outcome.end_s = time.perf_counter() - start_s
            try:
                kind, *size = image_size(image)
            except ValueError as error:
                raise Failed(str(error)) from error
            if size != [width, height]:
                raise Failed(
                    f"a {kind} of {size[0]}x{size[1]}, where {width}x{height} was asked for"
                )

    return read


def _images(body: bytes) -> list[bytes | str]:
    """Return the images of an answer: the bytes themselves, or where they are to be fetched."""
    try:
        images: list[bytes | str] = []
        for one in json.loads(body)["data"]:
            url = one.get("url")
            if url and not url.startswith("data:"):
                images.append(str(url))
            else:
                text = url.partition(",")[2] if url else one["b64_json"]
                images.append(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise Failed(f"an image is not base64: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Failed('the answer has no "data" with "b64_json" or "url"') from error
    return images


def summarise_images(
    outcomes: Sequence[Outcome], num_images: int, steps: int | None
) -> dict[str, Any]:
    """Return counts, rates and latencies, as plain values for JSON."""
    duration_s = max(outcome.end_s for outcome in outcomes)
    good_s = [one.end_s - one.sent_s for one in outcomes if one.error is None]
    per_step = [latency_s / steps for latency_s in good_s] if steps else []
    return {
        "num_requests": len(outcomes),
        "num_successful": len(good_s),
        "num_failed": len(outcomes) - len(good_s),
        "failures": failures(outcomes),
        "duration_s": round(duration_s, 3),
        "num_images": len(good_s) * num_images,
        "images_per_s": round(len(good_s) * num_images / duration_s, 4),
        "request_throughput_per_s": round(len(good_s) / duration_s, 4),
        "latency": summary_ms(good_s),
        "latency_from_scheduled_arrival": summary_ms(
            [o.end_s - o.arrival_s for o in outcomes if o.error is None and o.arrival_s is not None]
        ),
        "seconds_per_image": _mean(good_s, num_images),
        "seconds_per_step": _mean(per_step, 1),
    }


def _mean(values_s: Sequence[float], parts: int) -> float | None:
    return round(sum(values_s) / len(values_s) / parts, 4) if values_s else None


def _read_measured(path: Path) -> Slice:
    """Return what an earlier run measured on its slice; ValueError if the file is no such run."""
    try:
        document = json.loads(path.read_text("utf-8").splitlines()[-1])
        where = parse_slice(document["flags"]["slices"] or "1/1")
        return Slice(*where, float(document["images_per_s"]), float(document["seconds_per_image"]))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path}: expected the JSON of ridgeline bench images, with images that succeeded"
        ) from error


def _print(summary: dict[str, Any], plan: list[dict[str, Any]] | None, said: list[str]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{' Image Benchmark Result ':=^50}", style="bold")
    rows = {
        "Successful requests": summary["num_successful"],
        "Failed requests": summary["num_failed"],
        "Benchmark duration (s)": summary["duration_s"],
        "Images": summary["num_images"],
        "Image throughput (images/s)": summary["images_per_s"],
        "Seconds per image": summary["seconds_per_image"],
        "Seconds per step": summary["seconds_per_step"],
    }
    if latency := summary["latency"]:
        columns = {"Mean": "mean", "Median": "p50", "P95": "p95", "P99": "p99"}
        rows |= {f"{label} latency (ms)": latency[f"{key}_ms"] for label, key in columns.items()}
    for label, value in rows.items():
        if value is not None:
            text = f"{value:.3f}" if isinstance(value, float) else value
            out.print(f"{label + ':':<40} {text:<10}".rstrip())
    out.print("=" * 50, style="bold")
    if plan:
        out.print(drawn(slices_table(plan)))
    print_troubles(summary, said)


_PNG = b"\x89PNG\r\n\x1a\n"
# Markers of a frame: SOF0 to SOF15 without DHT, JPG and DAC (ITU-T T.81, table B.1).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def image_size(data: bytes) -> tuple[str, int, int]:
    """Return the format, width and height in pixels of a complete image.

    Raises ValueError if it is none of the three formats, is cut off, or is damaged.
    """
    try:
        if data.startswith(_PNG):
            return "png", *_png(data)
        if data.startswith(b"\xff\xd8"):
            return "jpeg", *_jpeg(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return "webp", *_webp(data)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the image is cut off after {len(data)} bytes") from error
    raise ValueError(f"{len(data)} bytes that are no PNG, JPEG or WebP image")


def _png(data: bytes) -> tuple[int, int]:
    """Walk all chunks (W3C PNG, third edition, section 5)."""
    at, kind = len(_PNG), b""
    while kind != b"IEND":
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 4 : at + 8 + length]
        (crc,) = struct.unpack_from(">I", data, at + 8 + length)
        if zlib.crc32(body) != crc:
            raise ValueError(f"the PNG's chunk {kind!r} at byte {at} is damaged")
        at += 12 + length
    if data[12:16] != b"IHDR":
        raise ValueError("the PNG does not begin with its header")
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _jpeg(data: bytes) -> tuple[int, int]:
    """Walk the segments up to the frame (ITU-T T.81, annex B)."""
    if not data.rstrip(b"\x00").endswith(b"\xff\xd9"):
        raise ValueError(f"the JPEG has no end: it is cut off after {len(data)} bytes")
    at = 2
    while True:
        while data[at + 1] == 0xFF:  # fill bytes
            at += 1
        marker, (length,) = data[at + 1], struct.unpack_from(">H", data, at + 2)
        if data[at] != 0xFF or marker == 0xDA:
            raise ValueError("the JPEG has no frame that says its size")
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        at += 2 + length


def _webp(data: bytes) -> tuple[int, int]:
    """Read the first chunk: VP8X, VP8L or VP8 (RFC 9649, sections 2.4 to 2.7)."""
    (length,) = struct.unpack_from("<I", data, 4)
    if len(data) < 8 + length:
        raise ValueError(f"the WebP is cut off: {len(data)} of {8 + length} bytes")
    if data[12:16] == b"VP8X":
        width, height = (int.from_bytes(data[i : i + 3], "little") + 1 for i in (24, 27))
        return width, height
    if data[12:16] == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if data[12:16] == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError("the WebP has no frame that says its size")


_MIG = (1, 2, 3, 4, 7)  # sevenths that profiles of MIG have


@dataclass(frozen=True, slots=True)
class Slice:
    """A measurement on ``part`` of ``whole`` parts of a card."""

    part: int
    whole: int
    images_per_s: float
    seconds_per_image: float


def parse_slice(text: str) -> tuple[int, int]:
    """Read a part of a card's compute, such as ``2/7``; ValueError if it is none."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match and 1 <= int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise ValueError(f"--slices {text} is not a part of a card such as 2/7, or 7/7 for all of it")


def plan_slices(measured: Sequence[Slice]) -> list[dict[str, Any]]:
    """Return a row for each slice: how many fit on a card, and what they do together.

    Args:
        measured: what was measured; the first is of the card that is planned. A run on the whole
            card may be 1/1.

    Raises:
        ValueError: if a run is of a card that is cut into another number of parts.
    """
    whole = measured[0].whole
    by_part: dict[int, Slice] = {}
    for run in measured:
        if run.part != run.whole and run.whole != whole:
            raise ValueError(
                f"one run was on {run.part}/{run.whole} of a card, another on "
                f"{measured[0].part}/{whole}: a plan is for one kind of card"
            )
        by_part.setdefault(whole if run.part == run.whole else run.part, run)
    parts = sorted({*by_part, whole, *(_MIG if whole == 7 else ())})
    rates = {part: _per_s(part, by_part) for part in parts}
    return [
        {
            "slice": f"{part}/{whole}",
            "per_card": whole // part,
            "images_per_s_of_each": round(rates[part], 4),
            "images_per_s_of_card": round(whole // part * rates[part], 4),
            "seconds_per_image": round(_seconds(part, by_part), 3),
            "ratio_to_whole_card": round(whole // part * rates[part] / rates[whole], 3),
            "source": "measured"
            if part in by_part
            else f"assumed from {_nearest(part, by_part)}/{whole}",
        }
        for part in parts
    ]


def _nearest(part: int, by_part: dict[int, Slice]) -> int:
    return min(by_part, key=lambda one: (abs(one - part), one))


def _per_s(part: int, by_part: dict[int, Slice]) -> float:
    near = _nearest(part, by_part)
    return by_part[near].images_per_s * part / near


def _seconds(part: int, by_part: dict[int, Slice]) -> float:
    near = _nearest(part, by_part)
    return by_part[near].seconds_per_image * near / part


def slices_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the plan as a table."""
    heads = ("slice", "a card", "images/s each", "a card's", "s/image", "to whole", "")
    cells = [
        (
            row["slice"],
            str(row["per_card"]),
            figure(row["images_per_s_of_each"]),
            figure(row["images_per_s_of_card"]),
            figure(row["seconds_per_image"]),
            f"{row['ratio_to_whole_card']:.2f}",
            row["source"],
        )
        for row in rows
    ]
    return Table(heads, cells, "lrrrrrl")
