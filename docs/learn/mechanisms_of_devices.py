"""Drawings of devices: a layer over ranks, a pipeline's bubbles, costs over batch and choice."""

from __future__ import annotations

from drawing import WIDTH, arrow, box, colour_of, heading, light, word

from ridgeline.engine.setup.home import stores
from ridgeline.model.cost.costs import Features
from ridgeline.planner import PlanFlags, plan
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.single_device import on_device
from ridgeline.system import svg

RANKS = 4
SUM = "add up the parts of all devices, and give each the sum"
STAGES = 4
DEVICE, USD_PER_HOUR, CONTEXT, PROMPT = "h100-sxm", 2.50, 1000, 500
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def layer_ranks() -> tuple[list[str], str]:
    """Draw a layer that four devices share: what each has, and when they add up their parts."""
    shape = read_model_spec("llama-3.1-70b.json", stores()).shape
    by_name = {matrix.name: matrix for matrix in shape.layers[0].matrices}
    lines = [f"{'matrix':22} rows x columns     of each of {RANKS}"]
    for name, matrix in by_name.items():
        if matrix.columns == 1:
            continue
        is_down = name.endswith(("o_proj", "down_proj"))
        rows, columns = matrix.rows, matrix.columns
        part = (rows, columns // RANKS) if is_down else (rows // RANKS, columns)
        lines.append(f"{name:22} {rows:6,} x {columns:6,}    {part[0]:6,} x {part[1]:6,}")
    ring = 2 * (RANKS - 1) / RANKS
    sent = 2 * ring * shape.hidden_size * 2
    lines.append(f"sent for a token and layer: 2 sums x {ring} x {shape.hidden_size:,} x 2 bytes = "
                 f"{sent:,.0f} bytes")  # fmt: skip
    per_rank = shape.num_heads // RANKS, shape.num_kv_heads // RANKS
    up = by_name["mlp.up_proj"].rows // RANKS
    note = f"Llama 3.1 70B over {RANKS} devices, a column for each. At a bar all wait for all."
    parts = heading("A layer, divided among four devices", note)
    bands = [
        ("queries, keys, values", f"{per_rank[0]} query, {per_rank[1]} KV heads", 0),
        ("attention, own cache", f"{per_rank[1]} KV heads", 2),
        ("output", f"{per_rank[0] * 128:,} columns", 0),
        ("", "", -1),
        ("MLP, up and gate", f"{up:,} rows", 1),
        ("MLP, down", f"{up:,} columns", 1),
        ("", "", -1),
    ]
    y = 84.0
    for name, said, colour in bands:
        if colour < 0:
            for rank in range(RANKS):
                x = 210 + rank * 170 + 72
                parts.append(arrow(x, y - 8, x, y + 6))
            fill, width = light(colour_of(3), 0.5), RANKS * 170 - 4
            parts.append(box(200, y + 6, width, 24, fill, "all-reduce"))
            parts.append(word(200 + width / 2, y + 22, SUM))
            y += 52
            continue
        parts.append(svg.text(24, y + 22, name))
        for rank in range(RANKS):
            x = 210 + rank * 170
            parts.append(box(x, y, 144, 32, light(colour_of(colour), 0.6), f"device {rank}"))
            parts.append(word(x + 72, y + 21, said))
        y += 42
    return lines, svg.picture(WIDTH, int(y) + 10, parts)


def schedule(num_parts: int, num_tokens: int) -> list[tuple[int, int, int, int]]:
    """Return (stage, begin, part, token): each stage takes one unit of time for a part.

    A part's next token begins when its last has left the last stage.
    """
    free = [0] * STAGES
    done = [0] * num_parts
    found = []
    for token in range(num_tokens):
        for part in range(num_parts):
            at = done[part]
            for stage in range(STAGES):
                begin = max(at, free[stage])
                found.append((stage, begin, part, token))
                at = free[stage] = begin + 1
            done[part] = at
    return found


def busy(num_parts: int, num_tokens: int) -> float:
    """Return the share of the time in which stages work."""
    found = schedule(num_parts, num_tokens)
    return len(found) / (STAGES * (1 + max(begin for _, begin, _, _ in found)))


def pipeline() -> tuple[list[str], str]:
    """Draw a pipeline of four stages with one part of a batch in it, and with four."""
    lines = ["parts of the batch   stages busy, 4 tokens   100 tokens"]
    lines += [f"{n:18} {busy(n, 4):22.0%} {busy(n, 100):12.0%}" for n in (1, 2, 4, 8)]
    note = "A colour is a part of the batch, a box a stage's work for one token. Grey is idle."
    parts, y, unit = heading("Four stages: one part at a time, and four", note), 92, 41.0
    for count in (1, 4):
        found = schedule(count, 4)
        parts.append(svg.text(24, y + 2, "one part" if count == 1 else "four parts", weight=600))
        end = 1 + max(begin for _, begin, _, _ in found)
        for stage in range(STAGES):
            top = y + 12 + stage * 30
            parts.append(svg.text(24, top + 18, f"stage {stage + 1}", size=svg.SMALL))
            parts.append(box(100, top, end * unit, 28, "#eaeef2", "idle"))
        for stage, begin, part, token in found:
            x, top = 100 + begin * unit, y + 12 + stage * 30
            parts.append(box(x, top, unit, 28, light(colour_of(part), 0.45),
                             f"part {part + 1}, token {token + 1}"))  # fmt: skip
            parts.append(word(x + unit / 2, top + 18, str(token + 1)))
        y += 12 + STAGES * 30 + 36
    said = "time, in units of a stage's work; a number is a token of the answer"
    parts.append(svg.text(100, y - 4, said, size=svg.SMALL, fill=svg.FAINT))
    return lines, svg.picture(WIDTH, y + 14, parts)


def phases() -> tuple[list[str], str]:
    """Draw what a token costs over the batch: of answers and of prompts, side by side."""
    replica = on_device(read_model_spec("llama-3.1-8b.json", stores()), PlanFlags(on=DEVICE))
    times = replica.latency_model.times
    rows = []
    for batch in BATCHES:
        positions = batch * CONTEXT
        answers = Features(batch, batch, batch, positions, positions)
        tokens = batch * PROMPT
        prompts = Features(tokens, batch, batch, tokens, batch * PROMPT * (PROMPT + 1) // 2)
        rows.append((batch, times.seconds(answers), times.seconds(prompts)))
    lines = [f"{'batch':>5}   {'answers: ms a step':>19} {'tokens/s':>9} {'USD a million':>14}   "
             f"{'prompts: ms a step':>19} {'tokens/s':>9} {'USD a million':>14}"]  # fmt: skip
    costs: list[tuple[int, float, float]] = []
    for count, answer_s, prompt_s in rows:
        rates = count / answer_s, count * PROMPT / prompt_s
        usd = [USD_PER_HOUR / 3600 / rate * 1e6 for rate in rates]
        costs.append((count, usd[0], usd[1]))
        lines.append(f"{count:5}   {1e3 * answer_s:19.1f} {rates[0]:9,.0f} {usd[0]:14.2f}   "
                     f"{1e3 * prompt_s:19.1f} {rates[1]:9,.0f} {usd[1]:14.3f}")  # fmt: skip
    low = min(usd for _, _, usd in costs)
    chart = svg.Chart(
        svg.Axis("requests in a step", 1, BATCHES[-1], ticks=BATCHES),
        svg.Axis("USD for a million tokens", low / 1.5, costs[0][1] * 1.5), height=460,
    )  # fmt: skip
    colours = {"a token of an answer": colour_of(2), "a token of a prompt": colour_of(0)}
    of_answers = [(float(batch), usd) for batch, usd, _ in costs]
    of_prompts = [(float(batch), usd) for batch, _, usd in costs]
    for points, colour in ((of_answers, colour_of(2)), (of_prompts, colour_of(0))):
        chart.curve(points, colour)
        for num, of_one in points:
            chart.dot(num, of_one, colour, f"{num:g} requests: {of_one:.3f} USD")
    note = (f"Llama 3.1 8B on {DEVICE} for {USD_PER_HOUR:.2f} USD an hour, always busy; prompts of "
            f"{PROMPT} tokens, answers behind {CONTEXT:,}.")  # fmt: skip
    return lines, chart.picture("What a token costs, over the batch", colours, note)


def choices() -> tuple[list[str], str]:
    """Draw what each choice of a plan costs, beside the time of a token."""
    found = plan(
        "llama-3.1-8b.json", on="rtx4090,l40s,h100-sxm", prices="prices.csv", request_rate=6.0,
        prompt_tokens="800", new_tokens="150", slo=("ttft:p95:1000", "tpot:p95:60"),
    ).as_dict()["choices"]  # fmt: skip
    lines = [f"{'choice':20} USD/h   a million tokens   tpot p95, ms   holds"]
    most = max(one["usd_per_hour"] for one in found)
    parts = heading("What each choice costs", "The length of a bar is USD an hour; beside it, the "
                    "time of a token that 95 % keep.")  # fmt: skip
    parts += svg.legend({"surely holds": colour_of(2), "likely holds": colour_of(4)}, 78)
    for row, one in enumerate(found):
        name = f"{one['num_devices']} x {one['device']}"
        name += f" (tp {one['tp']})" if one["tp"] > 1 else ""
        usd, token_ms = one["usd_per_hour"], one["tpot_ms"]["p95"]
        million = one["usd_per_million_output_tokens"]
        is_sure = one["surely_meets_slo"]
        holds = "surely" if is_sure else "likely"
        lines.append(f"{name:20} {usd:5.2f} {million:18.2f} {token_ms:14.0f}   {holds}")
        y, width = 100 + row * 30, 480 * usd / most
        colour = colour_of(2) if is_sure else colour_of(4)
        parts.append(svg.text(190, y + 16, name, anchor="end"))
        parts.append(box(200, y, width, 22, light(colour, 0.4), f"{usd:.2f} USD an hour"))
        said = f"{usd:.2f} USD/h, {token_ms:.0f} ms a token"
        parts.append(svg.text(208 + width, y + 16, said, size=svg.SMALL))
    return lines, svg.picture(WIDTH, 116 + len(found) * 30, parts)
