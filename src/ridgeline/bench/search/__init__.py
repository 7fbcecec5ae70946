"""``ridgeline bench search``: the highest load at which a server meets service levels.

It knows a server only by its URL, or by the command that starts it. A server of ours is asked first
what load it foresees to hold (``POST /v1/plan``): the search begins there. The trials are a table
that grows line by line, the answer is a sentence, and the last line is one JSON document."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from rich.console import Console

from ridgeline.bench.images import Images, make_reader, target_of
from ridgeline.bench.load.client_flags import ClientFlags, check_base_url
from ridgeline.bench.load.main import read_plan
from ridgeline.bench.load.stats import DEFINITIONS, Outcome, client_warnings
from ridgeline.bench.out_file import check_out, write_out
from ridgeline.bench.search.knee import LoadInterval, LoadSearch, interval, likely_limit
from ridgeline.bench.search.slo import RequestSlo, parse_slo
from ridgeline.bench.search.trial import TrialSetting, run_trial
from ridgeline.engine.setup.options import flag_field
from ridgeline.engine.setup.progress import say
from ridgeline.foresight.simulator.workload import Workload
from ridgeline.system import svg
from ridgeline.system.report import figure

# Of the server's forecast.
_TIMEOUT_S = 30.0
_NUM_QUESTIONS = 5
_PERCENTILES = (50, 90, 95, 99)  # of which a plan speaks
_COLOURS = {"held": svg.COLOURS[3], "failed": svg.COLOURS[2]}


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """What to search for; each field is a flag of the command line."""

    slo: list[str] | None = flag_field(
        None, "METRIC:PERCENTILE:MS, such as ttft:p95:500 or tpot:mean:50; also e2el; repeatable."
    )
    over: Literal["rate", "concurrency"] = flag_field(
        "rate", "What grows: requests per second, or requests at a time."
    )
    base_url: str | None = flag_field(
        None, "Address of the server, such as http://127.0.0.1:8000, with or without /v1."
    )
    serve: str | None = flag_field(
        None, "In place of --base-url: a command that starts the server, with {port} in it."
    )
    serve_timeout_s: float = flag_field(600.0, "Maximum time until that server is ready.")
    model: str | None = flag_field(None, "Name of the model. Default: the first that is listed.")
    num_prompts: int = flag_field(400, "Maximum number of requests that a trial counts.")
    start: float | None = flag_field(
        None,
        "First load to try. Default: the server's own forecast, or an estimate from the time of "
        "one answer.",
    )
    images: str | None = flag_field(
        None, "Ask for images of this size, such as 1024x1024; --extra-body has steps and the like."
    )
    max_trials: int = flag_field(16, "Maximum number of trials; usually 8 are enough.")
    out: Path | None = flag_field(None, "Write the goodput by load to this .svg, .csv or .md file.")

    def __post_init__(self) -> None:
        """Raise ValueError for flags that contradict each other or make no sense."""
        if not self.slo:
            raise ValueError("give a latency limit, for example --slo ttft:p95:500")
        metrics = {parse_slo(text).metric for text in self.slo}
        if self.images:
            Images(base_url="http://127.0.0.1", size=self.images)
            if metrics != {"e2el"}:
                raise ValueError("an image comes in one piece: its --slo can only be for e2el")
        if (self.base_url is None) == (self.serve is None):
            raise ValueError("name the server: --base-url URL, or --serve 'COMMAND {port}'")
        check_base_url(self.base_url or "http://127.0.0.1")
        for name, least in (("num_prompts", 20), ("max_trials", 1), ("serve_timeout_s", 0)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is {getattr(self, name)}; it must be at least {least}")
        if self.start is not None and not self.start > 0:
            raise ValueError(f"--start is {self.start}; it must be above 0")
        check_out(self.out)


def search(search_flags: SearchFlags, client_flags: ClientFlags, workload: Workload) -> bool:
    """Search, and print the trials, the answer and the JSON document. False if no load holds.

    Raises ValueError if the server cannot be started or does not serve, or a file is not what it
    should be, and OSError if it cannot be reached.
    """
    where = (
        served(search_flags.serve, client_flags.api_key, search_flags.serve_timeout_s)
        if search_flags.serve
        else nullcontext(search_flags.base_url)
    )
    seed = secrets.randbits(32) if workload.seed is None else workload.seed
    with where as base_url:
        model = search_flags.model
        if not search_flags.images:
            model = model or first_model(str(base_url), client_flags.api_key)
        client_flags = replace(client_flags, base_url=str(base_url), model=model or "")
        setting = (_setting_of_images if search_flags.images else _setting)(
            search_flags, client_flags, replace(workload, seed=seed)
        )
        first = _first_answers(setting, client_flags)
        setting.answer_s = sum(one.end_s - one.sent_s for one in first) / len(first)
        is_foreseen = setting.is_open and not search_flags.images
        foreseen = foreseen_rate(client_flags, setting.slos, first) if is_foreseen else None
        if foreseen is not None and search_flags.start is None:
            say(f"the server foresees that it holds up to {setting.describe(foreseen)}")
        bounds, likely, records = _trials(search_flags, setting, foreseen)
    answer = _answer(setting, bounds, likely, records)
    Console(highlight=False, soft_wrap=True).print(f"\n{answer['text']}", markup=False)
    if search_flags.out:
        picture = curve_svg(answer, records, setting.is_open, [str(s) for s in setting.slos])
        write_out(search_flags.out, [_row(i, r) for i, r in enumerate(records, 1)], picture)
        say(f"written: {search_flags.out}")
    flags = asdict(search_flags) | asdict(setting.workload) | asdict(client_flags)
    del flags["api_key"], flags["request_rate"], flags["max_concurrency"]
    flags = {name: str(v) if isinstance(v, Path) else v for name, v in flags.items()}
    document = {"flags": flags, "answer": answer, "trials": records, "definitions": DEFINITIONS}
    print(json.dumps(document, allow_nan=False))
    return bool(answer["low"])


def _setting(
    search_flags: SearchFlags, client_flags: ClientFlags, workload: Workload
) -> TrialSetting:
    return TrialSetting(
        target=client_flags.target(),
        workload=workload,
        slos=[parse_slo(text) for text in search_flags.slo or ()],
        is_open=search_flags.over == "rate",
        num_measured=search_flags.num_prompts,
        answer_s=0.0,
    )


def _setting_of_images(
    search_flags: SearchFlags, client_flags: ClientFlags, workload: Workload
) -> TrialSetting:
    """Return a search that asks for images; ValueError for flags that only text has."""
    for name in ("endpoint", "temperature", "top_k", "top_p", "min_p", "ignore_eos"):
        if getattr(client_flags, name) != ClientFlags.__dataclass_fields__[name].default:
            raise ValueError(f"--{name.replace('_', '-')} is for text; --images asks for none")
    images = Images(
        base_url=client_flags.base_url, model=search_flags.model, api_key=client_flags.api_key,
        size=search_flags.images or "", extra_body=client_flags.extra_body,
        timeout_s=client_flags.timeout_s,
    )  # fmt: skip
    workload = replace(workload, prompt_words=workload.prompt_words or "16")
    setting = _setting(search_flags, client_flags, workload)
    setting.target, setting.read = target_of(images, workload.seed or 0), make_reader(images)
    return setting


def _first_answers(setting: TrialSetting, client_flags: ClientFlags) -> list[Outcome]:
    """Ask a few at a time, and return what succeeded; ValueError if nothing did."""
    from ridgeline.bench.load.client import drive

    num = max(setting.workload.num_warmups, 1)
    workload = replace(
        setting.workload, request_rate=None, max_concurrency=num, num_prompts=num, num_warmups=num,
        trace_file=None, lengths_from=setting.workload.trace_file or setting.workload.lengths_from,
    )  # fmt: skip
    planned, _ = read_plan(workload)
    client_flags.check(planned[0])
    outcomes, _ = asyncio.run(
        drive(
            setting.target, planned[:num], planned[num:], num, lambda done, total: None,
            read=setting.read,
        )
    )  # fmt: skip
    good = [outcome for outcome in outcomes if outcome.error is None]
    if not good:
        raise ValueError(f"the server failed the first requests: {outcomes[0].error}")
    return good


def _trials(
    search_flags: SearchFlags, setting: TrialSetting, foreseen: float | None
) -> tuple[LoadInterval, float | None, list[dict[str, Any]]]:
    """Run trials until the answer is there, and print a line for each.

    Return the interval, the likely limit and the trials' records.
    """
    num_at_first = max(setting.workload.num_warmups, 1)
    start, least = num_at_first / setting.answer_s, 0.25 / setting.answer_s
    if not setting.is_open:
        start, least = float(num_at_first), 1.0
    start = (
        (search_flags.start if setting.is_open else round(search_flags.start))
        if search_flags.start
        else start
    )
    is_near = foreseen is not None and search_flags.start is None
    start = foreseen if foreseen is not None and is_near else start
    steps = LoadSearch(start, min(start, least), is_whole=not setting.is_open, is_near=is_near)
    out = Console(highlight=False, soft_wrap=True)
    labels = [slo.label for slo in setting.slos]
    unit = "requests/s" if setting.is_open else "at a time"
    heads = ("trial", unit, *(f"{label}, ms" for label in labels), "goodput/s", "")
    widths = [5, 10, *(max(len(head), 9) for head in heads[2:-1])]
    out.print(_line(heads, widths), style="bold")
    records: list[dict[str, Any]] = []
    while len(records) < search_flags.max_trials and (load := steps.next_load()) is not None:
        setting.is_rough = not is_near and interval(steps.trials).high is None
        trial, record = run_trial(setting, load, len(records) + 1)
        record["verdict"] = _verdict(record)
        steps.trials.append(trial)
        records.append(record)
        values = [_shown_ms(one) for one in record["slos"]]
        shown = f"{load:.4g}" if setting.is_open else f"{load:.0f}"
        goodput = figure(record["goodput_per_s"])
        cells = (str(len(records)), shown, *values, goodput, record["verdict"])
        out.print(_line(cells, widths), markup=False)
    return interval(steps.trials), likely_limit(steps.trials), records


def _shown_ms(of_slo: dict[str, Any]) -> str:
    """Return a percentile; where too many requests failed or were broken off, that it is late."""
    value_ms = of_slo["value_ms"]
    return "late" if value_ms is None else f"{value_ms:.1f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*aligned, cells[-1]]).rstrip()


def _verdict(record: dict[str, Any]) -> str:
    """Return in a few words whether a trial held, and if not, why."""
    num_failed = record["measured"]["num_failed"] if record["measured"] else 0
    failed = f", {num_failed} failed" if num_failed else ""
    if record["is_overloaded"]:
        return "the queue grew" + failed
    missed = [one for one in record["slos"] if not one["holds"]]
    if not missed:
        return "held"
    return "; ".join(map(_missed, missed)) + failed


def _missed(one: dict[str, Any]) -> str:
    if ":mean:" in one["slo"]:
        return f"{one['slo']} was {_shown_ms(one)}"
    return f"{one['num_met']} of {one['num']} met {one['slo']}"


def _answer(
    setting: TrialSetting, bounds: LoadInterval, likely: float | None, records: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the interval, whether it is confirmed, and the sentence that says so."""
    low, high = bounds.low, bounds.high
    slos = " and ".join(str(slo) for slo in setting.slos)
    is_confirmed = all(end is not None and end.num_trials > 1 for end in (low, high))
    nearest: list[str] = []
    if low is None:
        assert high is not None  # there is a trial, and it failed
        worst = [
            max(one["value_ms"] or math.inf for one in same)
            for same in zip(*(r["slos"] for r in records if r["load"] == high.load), strict=True)
        ]
        if math.inf not in worst:
            pairs = zip(setting.slos, worst, strict=True)
            nearest = [str(replace(s, limit_ms=max(s.limit_ms, math.ceil(ms)))) for s, ms in pairs]
        text = f"{slos} cannot be met: not even at {setting.describe(high.load)}."
        text += (
            f" The nearest that can: {' '.join(f'--slo {one}' for one in nearest)}"
            if nearest
            else f" Too many requests fail there: {records[-1]['verdict']}"
        )
    elif high is None:
        text = f"{slos} held in every trial, up to {setting.describe(low.load)}: allow --max-trials"
    else:
        sure = "each tried twice" if is_confirmed else "not confirmed: allow more --max-trials"
        text = (
            f"{slos} holds up to {setting.describe(low.load)}, and fails at "
            f"{setting.describe(high.load)} ({sure})."
        )
    if likely is not None:
        text += f" All trials together speak for a limit of {setting.describe(likely)}."
    if any(client_warnings(record["client"]) for record in records):
        text += " The client itself was late in some trials: run it elsewhere to be sure."
    return {
        "over": "rate" if setting.is_open else "concurrency",
        "low": low and low.load,
        "high": high and high.load,
        "likely": likely,
        "is_confirmed": is_confirmed,
        "nearest": nearest,
        "text": text,
    }


def _row(number: int, record: dict[str, Any]) -> dict[str, Any]:
    values = {one["slo"]: one["value_ms"] for one in record["slos"]}
    return {
        "trial": number,
        "load": record["load"],
        "requests": record["measured"]["num_requests"] if record["measured"] else 0,
        "requests_per_s": record["completed_per_s"],
        "goodput_per_s": record["goodput_per_s"],
        **{f"{slo} (ms)": value for slo, value in values.items()},
        "verdict": record["verdict"],
    }


def foreseen_rate(
    client_flags: ClientFlags, slos: Sequence[RequestSlo], first: Sequence[Outcome]
) -> float | None:
    """Return the highest rate, requests per second, that a server foresees to hold.

    None if it foresees nothing: it has no such route, model or bound. ``POST /v1/plan`` says of its
    machine, by the server's own model of time, what a load would see. Rates are narrowed by a few
    such questions; none of them is a request for an answer.

    Args:
        client_flags: whom, and which model.
        slos: what must hold.
        first: some answers of the load, which say how long prompts and answers are.
    """
    lengths = [(one.prompt_tokens, one.usage_tokens) for one in first]
    pairs = [(prompt, new) for prompt, new in lengths if prompt and new]
    if not pairs:
        return None
    body = {
        "model": client_flags.model,
        "on": "here",
        "replicas": 1,
        "prompt_tokens": max(1, round(mean(prompt for prompt, _ in pairs))),
        "new_tokens": max(1, round(mean(new for _, new in pairs))),
        "slo": [f"{slo.metric}:{_nearest(slo)}:{slo.limit_ms:g}" for slo in slos],
    }
    try:
        knee_per_s = _knee_per_s(client_flags, body)
        low, high = knee_per_s / 16, knee_per_s
        for _ in range(_NUM_QUESTIONS):
            middle = math.sqrt(low * high)
            if _choice(client_flags, body, middle)["meets_slo"]:
                low = middle
            else:
                high = middle
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return low if low > knee_per_s / 16 else None


def _nearest(slo: RequestSlo) -> str:
    if slo.percent is None:
        return "mean"
    percent = slo.percent
    return f"p{min(_PERCENTILES, key=lambda one: abs(one - percent))}"


def _knee_per_s(client_flags: ClientFlags, body: dict[str, Any]) -> float:
    """Return the most requests per second that the server can answer at all."""
    rate_per_s = 1e-2  # any: its share of the knee says where that is
    return float(rate_per_s / _choice(client_flags, body, rate_per_s)["utilisation"])


def _choice(client_flags: ClientFlags, body: dict[str, Any], rate_per_s: float) -> dict[str, Any]:
    url = client_flags.base_url.rstrip("/").removesuffix("/v1") + "/v1/plan"
    headers = {"Content-Type": "application/json"}
    if client_flags.api_key:
        headers["Authorization"] = f"Bearer {client_flags.api_key}"
    data = json.dumps(body | {"request_rate": rate_per_s}).encode()
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        (choice,) = json.load(response)["choices"]
    answer: dict[str, Any] = choice
    return answer


def curve_svg(
    answer: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], is_open: bool, slos: list[str]
) -> str:
    """Return the curve: load to the right, logarithmic; goodput in requests per second upwards.

    Above the limit goodput falls although load grows, and the interval that answers is shaded.

    Args:
        answer: ``low`` and ``high`` are shaded, where both are there.
        trials: each with ``load``, ``goodput_per_s`` and ``verdict``.
        is_open: loads are requests per second, else requests at a time.
        slos: the service levels, for the title.
    """
    dots = sorted((trial["load"], trial["goodput_per_s"], trial["verdict"]) for trial in trials)
    unit = "requests per second sent" if is_open else "requests at a time"
    highest = max([goodput for _, goodput, _ in dots] + [1e-6])
    chart = svg.Chart(
        svg.Axis(unit, dots[0][0] / 1.3, dots[-1][0] * 1.3),
        svg.Axis("goodput, requests/s", 0, highest * 1.15, is_log=False),
    )
    if answer["low"] and answer["high"]:
        low, high = answer["low"], answer["high"]
        shown = f"{figure(low)} to {figure(high)}"
        chart.shade(shown, across=(low, high))
        chart.parts.append(
            svg.text(chart.x(low), chart.top - 8, shown, size=svg.SMALL, anchor="middle",
                     fill=svg.FAINT)
        )  # fmt: skip
    chart.curve([(load, goodput) for load, goodput, _ in dots], svg.FAINT, 1.5)
    for load, goodput, said in dots:
        chart.dot(load, goodput, _COLOURS["held" if said == "held" else "failed"])
    return chart.picture(f"Goodput within {' and '.join(slos)}", _COLOURS)


_PERIOD_S = 0.2
_GRACE_S = 15.0  # to end by itself, before it is killed


def first_model(base_url: str, api_key: str | None, timeout_s: float = 10.0) -> str:
    """Return the first model that a server lists.

    Raises ValueError if it lists none, and OSError, which names the address, if it does not answer.
    """
    url = base_url.rstrip("/").removesuffix("/v1") + "/v1/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return str(json.load(response)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{url} lists no model: name one with --model") from error
    except OSError as error:
        raise OSError(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


@contextmanager
def served(command: str, api_key: str | None, timeout_s: float) -> Iterator[str]:
    """Start a server by ``command``, whose ``{port}`` becomes a free one; yield its base URL.

    It is ready once it lists its models. At the end it and its children are ended.

    Raises:
        ValueError: if the command has no ``{port}``, ends before it is ready, or takes longer than
            ``timeout_s``; with the last line that it wrote.
    """
    if "{port}" not in command:
        raise ValueError(f"--serve {command!r} has no {{port}}: write it where the port belongs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        say(f"starting {command.replace('{port}', str(port))}")
        process = subprocess.Popen(
            shlex.split(command.replace("{port}", str(port))),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            end_s = time.monotonic() + timeout_s
            while not _is_ready(url, api_key):
                if process.poll() is not None or time.monotonic() > end_s:
                    output.seek(0)
                    last = ([""] + [line for line in output.read().splitlines() if line.strip()])[
                        -1
                    ]
                    how = f"is not ready after {timeout_s:g} s"
                    if process.returncode is not None:
                        how = f"ended with status {process.returncode}"
                    raise ValueError(f"--serve: the server {how}; it last said: {last[:300]}")
                time.sleep(_PERIOD_S)
            yield url
        finally:
            _end(process)


def _is_ready(url: str, api_key: str | None) -> bool:
    try:
        first_model(url, api_key, timeout_s=2.0)
    except (OSError, ValueError):
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process gently, then whatever is left of its children and of itself."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
