"""What to buy for a model: known sums, known speeds, what is said, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from ridgeline.cli.commands.plan import show
from ridgeline.model.cost.ownership import PC, SERVER, Owned
from ridgeline.planner import Plan, plan
from ridgeline.planner.capacity.option import CapacityOption
from ridgeline.planner.capacity.report import choices_svg
from ridgeline.planner.catalogue import devices, offers
from ridgeline.planner.documents import as_csv
from tests.cli.test_main import ridgeline
from tests.model.cost.published_configs import PUBLISHED

LLAMA = PUBLISHED["llama-3.1-8b"]["config"]
LARGE = PUBLISHED["llama-3.1-70b"]["config"]


def owned(device: str, ranks: int = 1, **terms: float) -> Owned:
    usual = {"usd_per_kwh": 0.3, "years": 2.0, "hours_per_day": 10.0}
    return Owned(offers()[device], devices()[device].watts, ranks, **(usual | terms))


def bought(model: Any = LLAMA, **wishes: Any) -> Plan:
    return plan(model, buy=True, **wishes)


def test_a_card_is_paid_with_the_pc_around_it_and_a_machine_alone() -> None:
    card = owned("rtx3090").bill(1)
    assert (card.usd, card.hosts, card.watts) == (850 + PC.usd, 1, 350 + PC.watts)
    assert card.power_usd_per_hour == pytest.approx(0.450 * 0.3)
    assert card.spread_usd_per_hour == pytest.approx(2050 / (2 * 365.25 * 10))
    mac = owned("m4-max-36").bill(3)
    assert (mac.usd, mac.hosts, mac.watts) == (3 * 2499, 0, 3 * 75)


@pytest.mark.parametrize(
    ("ranks", "num", "host", "hosts"),
    [(1, 2, PC, 1), (1, 3, PC, 2), (2, 4, PC, 2), (4, 4, SERVER, 1), (4, 12, SERVER, 2),
     (8, 16, SERVER, 2)],
)  # fmt: skip
def test_cards_of_a_replica_stand_in_one_machine(
    ranks: int, num: int, host: Any, hosts: int
) -> None:
    cards = owned("rtx3090", ranks)
    assert cards.host == host
    assert cards.bill(num).usd == num * 850 + hosts * host.usd
    assert cards.of(num, devices()["rtx3090"]) == pytest.approx(
        cards.bill(num).power_usd_per_hour + cards.bill(num).spread_usd_per_hour
    )


def test_the_cheapest_in_all_that_holds_it_is_first() -> None:
    found = bought(on="rtx3090,rtx4090,m4-max,dgx-spark,cpu-epyc-9755")
    good = [choice for choice in found.choices if choice.meets_slo]
    costs = [choice.usd_per_hour or 0 for choice in good]
    assert costs == sorted(costs)
    assert found.choices[: len(good)] == tuple(good)
    for choice in found.choices:
        check(choice)


def check(choice: CapacityOption) -> None:
    """The document's sums are those of the bill."""
    bill, document = choice.bill, choice.as_dict()
    assert bill is not None
    assert document["purchase"]["usd"] == bill.usd
    assert document["purchase"]["watts"] == bill.watts
    per_hour = bill.power_usd_per_hour + bill.spread_usd_per_hour
    assert document["usd_per_hour"] == pytest.approx(per_hour)
    million, power = choice.usd_per_million_tokens, choice.power_usd_per_million_tokens
    if million is not None and power is not None:
        assert power / million == pytest.approx(bill.power_usd_per_hour / per_hour)
        assert million == pytest.approx(per_hour / (choice.goodput_per_s * 300 * 3600) * 1e6)


def test_the_sentence_says_what_to_buy_at_what_price_and_power() -> None:
    found = bought(on="3090")
    assert found.answer.startswith("buy 1 x rtx3090 in 1 PC for 2,050 USD, at most 450 W; each")
    assert "tokens/s; a million tokens cost " in found.answer
    assert "USD, of which power " in found.answer
    assert any("prompts of 1000 tokens, answers of 300" in note for note in found.assumptions)
    assert any("8 hours a day for 3 years" in note for note in found.assumptions)
    assert any("a PC around cards or a processor costs 1,200 USD" in n for n in found.assumptions)
    assert any("--dtype q4_k" in note for note in found.assumptions)


def test_more_users_and_a_larger_model_want_more() -> None:
    one, many = (bought(on="3090", users=users).choices[0] for users in (1, 16))
    assert one.num_devices <= many.num_devices
    assert many.tokens_per_s[1] > 4 * one.tokens_per_s[1]
    assert (many.usd_per_million_tokens or 0) < (one.usd_per_million_tokens or 0)
    large = bought(LARGE, on="3090,mac studio,dgx spark", dtype="q4_k")
    assert {choice.placement.device.id for choice in large.choices} >= {"rtx3090", "dgx-spark"}
    for choice in large.choices:
        assert choice.placement.num_devices == 1 or choice.placement.device.id != "m3-ultra-96"


def test_what_has_no_price_is_named_and_not_bought() -> None:
    found = bought(on="m1-max,3090")
    assert {choice.placement.device.id for choice in found.choices} == {"rtx3090"}
    assert "m1-max-64: no price to buy it is known" in found.warnings


def test_electricity_years_and_hours_count() -> None:
    base = bought(on="3090").choices[0]
    dear = bought(on="3090", usd_per_kwh=0.5).choices[0]
    assert base.bill is not None
    assert dear.bill is not None
    assert dear.bill.power_usd_per_hour == pytest.approx(2 * base.bill.power_usd_per_hour)
    longer = bought(on="3090", years=6.0).choices[0]
    assert longer.bill is not None
    assert longer.bill.spread_usd_per_hour == pytest.approx(base.bill.spread_usd_per_hour / 2)


@pytest.mark.parametrize(
    ("wishes", "part"),
    [
        ({"users": 3}, "--users needs --buy: without it, give --max-concurrency"),
        ({"buy": True, "spot": True}, "--spot is for renting"),
        ({"buy": True, "prices": "mine.csv"}, "--prices is for renting"),
        ({"buy": True, "users": 2, "request_rate": 1.0}, "give no rate or trace"),
        ({"buy": True, "users": 0}, "--users is 0"),
        ({"buy": True, "hours_per_day": 25.0}, "--hours-per-day is 25.0: it must be at most 24"),
        ({"buy": True, "years": 0.0}, "--years is 0.0"),
    ],
)
def test_what_contradicts_a_purchase_is_refused(wishes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        plan(LLAMA, on="l4", **wishes)


def test_bars_have_the_lengths_of_their_costs() -> None:
    found = bought(on="rtx3090,rtx4090,m4-max,dgx-spark")
    tree = ElementTree.fromstring(choices_svg("To buy", found.answer, found.choices))
    svg = "{http://www.w3.org/2000/svg}"
    boxes = [
        (float(box.get("width", "")), float((title.text or "").split(": ")[1].split(" ")[0]))
        for box in tree.iter(f"{svg}rect")
        if (title := box.find(f"{svg}title")) is not None and "USD" in (title.text or "")
    ]
    assert len(boxes) == 2 * len([c for c in found.choices if c.usd_per_million_tokens])
    scale = max(width / usd for width, usd in boxes if usd > 1)
    for width, usd in boxes:
        assert width == pytest.approx(scale * usd, rel=0.01, abs=0.02 * scale)
    names = [text.text or "" for text in tree.iter(f"{svg}text")]
    assert any("1 x rtx3090 in 1 PC" in name for name in names)
    with pytest.raises(ValueError, match="nothing to draw"):
        choices_svg("To buy", "", ())


def test_the_command_shows_a_table_that_fits_a_terminal(tmp_path: Path) -> None:
    path, picture = tmp_path / "config.json", tmp_path / "buy.svg"
    path.write_text(json.dumps(LLAMA))
    done = ridgeline(
        "plan", str(path), "--buy", "--users", "3", "--on", "RTX 3090,m4-max", "--out",
        str(picture), COLUMNS="100",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert "what to buy" in done.stdout
    assert "--on RTX 3090: taken for rtx3090" in done.stdout
    assert "buy 1 x rtx3090 in 1 PC for 2,050 USD" in " ".join(done.stdout.split())
    ElementTree.fromstring(picture.read_text())


def test_a_spreadsheet_has_a_column_for_each_figure() -> None:
    header, *rows = as_csv(bought(on="3090")).splitlines()
    assert rows
    assert "purchase" in header


def test_without_a_bound_clients_at_a_time_hold_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    words = ("--prompt-tokens", "300", "--new-tokens", "40", "--on", "l4")
    free = ridgeline("plan", str(path), *words, "--max-concurrency", "2", COLUMNS="160").stdout
    assert "surely" not in free
    assert "likely" not in free


def test_concurrency_of_a_purchase_is_refused_with_the_right_flag() -> None:
    with pytest.raises(ValueError, match="--users"):
        plan(LLAMA, buy=True, concurrency=8)


def test_what_is_too_dear_to_buy_is_said_with_the_least_and_without_a_table() -> None:
    found = bought(users=2, on="rtx3090,m4-max-128").choices
    least = min(choice.usd_per_hour for choice in found if choice.usd_per_hour is not None)
    none = bought(users=2, on="rtx3090,m4-max-128", max_usd_per_hour=0.001)
    assert none.answer.startswith("--max-usd-per-hour 0.001 leaves nothing: the cheapest that ")
    assert none.answer.endswith(f" for {least:.3g} USD per hour")
    printed = io.StringIO()
    show(none, Console(file=printed, width=100))
    assert "USD/h" not in printed.getvalue()
    assert "leaves nothing" in printed.getvalue()
