"""The page of plans in a real browser: its form, what it shows, its address, its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from ridgeline.serve.routes import plans as plan_routes
from ridgeline.system.report import gb
from tests.serve.page.browser import DESK, PHONE, browsing, find, says, sees, set_size, texts
from tests.serve.serving import Served, serving
from tests.serve.test_plans import ask, config

DROP = """
const data = new DataTransfer();
data.items.add(new File([arguments[0]], 'config.json', { type: 'application/json' }));
const how = { dataTransfer: data, bubbles: true, cancelable: true };
document.body.dispatchEvent(new DragEvent('drop', how));
"""


@pytest.fixture(scope="module")
def planner(model: Path) -> Iterator[Served]:
    """A server that gives a plan the time that it takes on a busy machine."""
    with pytest.MonkeyPatch.context() as patch, serving(model) as served:
        patch.setattr(plan_routes, "MOST_S", 600.0)
        yield served


@pytest.fixture
def plans(browser: Chrome, planner: Served) -> Iterator[Chrome]:
    """The page as one finds it; at the end the browser's log has no complaint."""
    browser.get("about:blank")
    browser.get(f"{planner.url}/plan")
    sees(lambda: says(browser, "#answer", "It fits on this machine"))
    browser.get_log("browser")
    yield browser
    assert [line for line in browser.get_log("browser") if line["source"] != "network"] == []


def give(browser: Chrome, name: str, **state: str) -> None:
    """Open the page with a config, on some devices."""
    url = browser.current_url.partition("#")[0]
    text = json.dumps(config(name))
    browser.get("about:blank")
    browser.get(f"{url}#{urlencode({'config': text, **state})}")
    sees(lambda: says(browser, "#facts", "parameters") and not says(browser, "#facts", "tiny"))


def rows(browser: Chrome, body: str) -> dict[str, list[str]]:
    """Return the cells of a table's rows by the first of each."""
    script = """
    return [...document.querySelectorAll(`#${arguments[0]} tr`)]
      .map((row) => [...row.cells].map((cell) => cell.innerText));
    """
    return {first: rest for first, *rest in browser.execute_script(script, body)}


def test_the_served_model_is_planned_at_once(plans: Chrome, planner: Served) -> None:
    found = ask(planner, model="tiny")
    assert says(plans, "#facts", "tiny: ")
    lines = rows(plans, "lines")
    *names, margin = [line["name"] for line in found["memory"]["lines"]]
    assert list(lines) == [*names, "needs", margin]
    assert lines["needs"][1] == gb(found["memory"]["per_device"]["needed_bytes"])
    assert not find(plans, "#config-field").is_displayed()
    find(plans, "#to-chat").click()
    sees(lambda: plans.find_elements(By.CSS_SELECTOR, "#question"))
    find(plans, ".to-plan").click()
    sees(lambda: says(plans, "#answer", "It fits on this machine"))


def test_several_cards_in_one_machine_are_planned_beside_its_ram(
    plans: Chrome, planner: Served
) -> None:
    state = {"on": "rtx4090,rtx3090", "together": "+", "ram": "32GB", "dtype": "q4_k"}
    give(plans, "llama-3.1-70b", **state)
    wishes = {"on": "rtx4090+rtx3090", "ram": "32GB", "dtype": "q4_k"}
    found = ask(planner, model=config("llama-3.1-70b"), **wishes)
    sees(lambda: says(plans, "#answer", "It runs on one"))
    offload = found["offload"]
    assert texts(plans, "#offload-command") == [offload["command"]]
    for name in ("", "_low", "_high"):
        assert f"{offload[f'prompt_tokens_per_s{name}']:.0f}" in texts(plans, "#offload-prompts")[0]
    for part in ("#memory-part", "#devices-part"):  # of a card alone, which is too small
        assert not find(plans, part).is_displayed()
    shown = rows(plans, "offload")
    for one in found["offload"]["devices"]:
        assert f"{one['token_ms']:.1f} ms a token" in shown[one["device"]][1]
    give(plans, "phi-4", on="h100-sxm")
    sees(lambda: says(plans, "#answer", "fits on"))
    assert not find(plans, "#offload-part").is_displayed()
    assert find(plans, "#memory-part").is_displayed()


def test_a_phone_shows_what_to_type_whole(plans: Chrome) -> None:
    set_size(plans, PHONE)
    give(plans, "llama-3.1-70b", on="rtx4090,rtx3090", together="+", ram="32GB", dtype="q4_k")
    sees(lambda: says(plans, "#answer", "It runs on one"))
    width = "return document.documentElement.scrollWidth"
    assert plans.execute_script(width) <= PHONE[0]
    for part in ("#offload-command", "#offload-prompts", "#offload-speed"):
        box = find(plans, part).rect
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE[0]
    set_size(plans, DESK)


def test_what_is_shown_is_what_the_server_says(plans: Chrome, planner: Served) -> None:
    give(plans, "phi-4", on="l4,h100-sxm", context="8192", concurrency="4")
    wishes = {"on": "l4,h100-sxm", "context": 8192, "concurrency": 4}
    found = ask(planner, model=config("phi-4"), compare_published=True, **wishes)
    assert texts(plans, "#answer") == [f"It {found['answer']}."]
    lines = rows(plans, "lines")
    for line in found["memory"]["lines"]:
        size, how = lines[line["name"]]
        number, unit = size.split()
        shown = float(number) * {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}[unit]
        assert shown == pytest.approx(line["bytes"], rel=0.01)
        assert how == line["how"]
    widths = plans.execute_script(
        "return [...document.querySelectorAll('#bar i')].map((one) => one.offsetWidth)"
    )
    one = found["memory"]["per_device"]
    assert widths[0] / sum(widths) == pytest.approx(
        one["weights_bytes"] / one["capacity_bytes"], abs=0.01
    )
    table = rows(plans, "devices")
    assert list(table) == [row["device"] for row in found["devices"]]
    assert table["h100-sxm"][4] == f"{found['devices'][1]['max_concurrency']:,}"
    formula, published = rows(plans, "published"), found["published"]
    assert formula["KV cache"][1] == f"{published['kv_gb']:.2f}"
    for figure in (published["total_gb"], published["plain_total_gb"]):
        assert f"{figure:.2f}" in formula["total"][1]
    for figure in (published["activations_gb"], published["plain_activations_gb"]):
        assert f"{figure:.2f}" in formula["activations"][1]
    assert texts(plans, "#why-wrong li") == published["why_wrong"]


def test_each_change_is_one_request_and_stands_in_the_address(
    plans: Chrome, planner: Served
) -> None:
    give(plans, "gemma-3-1b", on="l4")
    planner.num_lines()  # with that of this plan
    before = len([line for line in planner.lines if "path=/v1/plan " in line])
    four_keys = """
    for (const [i] of [...arguments[1]].entries()) {
      arguments[0].value = arguments[1].slice(0, i + 1);
      arguments[0].dispatchEvent(new Event('input', { bubbles: true }));
    }
    """
    plans.execute_script(four_keys, find(plans, "[name=context]"), "2048")  # one change
    sees(lambda: says(plans, "#answer", "sequences of 2,048 tokens"))
    as_stored = rows(plans, "lines")
    Select(find(plans, "[name=dtype]")).select_by_value("int4")
    sees(lambda: "dtype=int4" in plans.current_url)
    sees(lambda: rows(plans, "lines") != as_stored)
    sees(lambda: len([one for one in planner.lines if "path=/v1/plan " in one]) == before + 2)
    weights = rows(plans, "lines")
    answer = texts(plans, "#answer")
    assert "context=2048" in plans.current_url
    plans.refresh()
    sees(lambda: texts(plans, "#answer") == answer)
    assert rows(plans, "lines") == weights
    assert find(plans, "[name=context]").get_attribute("value") == "2048"
    find(plans, "[type=reset]").click()
    sees(lambda: says(plans, "#facts", "tiny: "))
    assert "gemma" not in plans.current_url


def test_a_dropped_config_and_the_keyboard(plans: Chrome) -> None:
    plans.execute_script(DROP, json.dumps(config("llama-3.1-8b")))
    sees(lambda: says(plans, "#facts", "8.03 B parameters"))
    assert find(plans, "#config-field").is_displayed()
    sees(lambda: len(rows(plans, "devices")) > 10)
    name = plans.find_element(By.XPATH, "//button[.='l40s']")
    plans.execute_script("arguments[0].focus()", name)
    ActionChains(plans).send_keys(Keys.ENTER).perform()
    sees(lambda: says(plans, "#answer", "one NVIDIA L40S"))
    assert not find(plans, "#devices-part").is_displayed()
    assert "on=l40s" in plans.current_url


def test_what_does_not_fit_says_what_would_help(plans: Chrome) -> None:
    give(plans, "llama-3.1-70b", on="l4", tensor_parallel_size="1")
    assert says(plans, "#answer", "does not fit on one")
    assert find(plans, "#answer code").text.startswith("--")
    assert find(plans, "#bar b").is_displayed()  # where the device ends
    assert find(plans, "details:last-of-type").get_attribute(
        "open"
    )  # it has a field that is filled


def test_what_is_wrong_is_said_and_the_old_plan_fades(plans: Chrome) -> None:
    give(plans, "gemma-3-1b", on="l4")
    field = find(plans, "[name=config]")
    field.send_keys(Keys.END, "x")
    sees(lambda: says(plans, "#problem", "config.json: "))
    no_json = texts(plans, "#problem")
    assert "stale" in str(find(plans, "#plan").get_attribute("class"))
    plans.execute_script("arguments[0].value = '{\"hidden_size\": 7}'", field)
    field.send_keys(" ")
    sees(lambda: says(plans, "#problem", "config.json: ") and texts(plans, "#problem") != no_json)
    plans.execute_script("arguments[0].value = arguments[1]", field, json.dumps(config("phi-4")))
    field.send_keys(" ")
    sees(lambda: says(plans, "#facts", "14.7 B"))
    assert texts(plans, "#problem") == [""]
    find(plans, "details:last-of-type summary").click()
    find(plans, "[name=gpu_memory_utilization]").send_keys("most")
    sees(lambda: says(plans, "#problem", "gpu_memory_utilization"))


LOAD = {"prompt_tokens": "300", "new_tokens": "20", "request_rate": "4"}
BOUNDS = {"ttft_ms": "900", "tpot_ms": "60", "tpot_at": "mean"}


def test_a_load_shows_choices_and_their_picture(plans: Chrome, planner: Served) -> None:
    give(plans, "llama-3.1-8b", on="l4,a100-80-sxm", **LOAD, **BOUNDS)
    body = {"model": config("llama-3.1-8b"), "on": "l4,a100-80-sxm", "request_rate": 4.0}
    lengths = {name: LOAD[name] for name in ("prompt_tokens", "new_tokens")}
    found = ask(planner, **body, **lengths, slo=["ttft:p95:900", "tpot:mean:60"])
    answer = found["answer"]
    assert texts(plans, "#answer") == [f"{answer[0].upper()}{answer[1:]}."]
    heads = texts(plans, "#choices-head th")
    assert heads[3:5] == ["ttft p95, ms", "tpot mean, ms"]
    shown = plans.execute_script(
        "return [...document.querySelectorAll('#choices tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    assert len(shown) == len(found["choices"])
    for cells, choice in zip(shown, found["choices"], strict=True):
        assert cells[0].startswith(f"{choice['num_devices']} x {choice['device']}")
        assert ("◆" in cells[0]) == choice["on_frontier"]
        cost = choice["usd_per_hour"]
        assert cells[1] == ("\N{EN DASH}" if cost is None else f"{cost:.2f}")
        times = [float(one) for one in re.findall(r"\d+", cells[3])]
        middle, low = (choice["ttft_ms"][name] for name in ("p95", "p95_low"))
        assert times[:2] == pytest.approx([middle, low], abs=0.51)
        assert cells[5].startswith(
            "surely" if choice["surely_meets_slo"] else "likely" if choice["meets_slo"] else "no"
        )
        assert cells[6] == choice["limited_by"]
    assert "stale" not in str(find(plans, "#plan").get_attribute("class"))
    assert len(plans.find_elements(By.CSS_SELECTOR, "#picture svg circle")) == len(shown) + 2
    assert not find(plans, "#computing").is_displayed()
    plans.refresh()
    sees(lambda: says(plans, "#answer", answer[1:]))
    assert find(plans, "[name=request_rate]").get_attribute("value") == "4"
    assert find(plans, "[name=tpot_at]").get_attribute("value") == "mean"
    for name in (*LOAD, *BOUNDS):  # without a load it is a plan of memory again
        plans.execute_script("arguments[0].value = ''", find(plans, f"[name={name}]"))
    find(plans, "[name=context]").send_keys("2048")
    sees(lambda: says(plans, "#answer", "It fits on"))
    assert not find(plans, "#choices-part").is_displayed()


def test_the_picture_is_dark_where_the_page_is(plans: Chrome) -> None:
    give(plans, "llama-3.1-8b", on="l4", **LOAD)
    sees(lambda: find(plans, "#picture svg").is_displayed())
    script = """
    const lightness = (part, name) => {
      const style = getComputedStyle(document.querySelector(part));
      const rgb = style[name].match(/[\\d.]+/g).map(Number);
      return (rgb[0] + rgb[1] + rgb[2]) / 765;
    };
    return {
      ground: lightness('#picture svg > rect', 'fill'), title: lightness('#picture text', 'fill'),
      edge: lightness('#picture text', 'stroke'), grid: lightness('#picture line', 'stroke'),
    };
    """

    def shown(scheme: str) -> dict[str, float]:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        plans.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        found: dict[str, float] = plans.execute_script(script)
        return found

    light, dark = shown("light"), shown("dark")
    plans.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert light["ground"] == light["edge"] == 1
    assert light["title"] < 0.3
    assert dark["ground"] == dark["edge"] < 0.2
    assert dark["ground"] < dark["grid"] < 0.4
    assert dark["title"] > 0.8


def test_a_plan_for_a_load_says_that_it_computes_and_the_last_change_wins(plans: Chrome) -> None:
    long = {"new_tokens": "4000", "max_concurrency": "200", "tpot_ms": "9", "tpot_at": "p99"}
    url = plans.current_url.partition("#")[0]
    state = {"config": json.dumps(config("llama-3.1-8b")), "on": "l4,h100-sxm"}
    plans.get("about:blank")
    plans.get(f"{url}#{urlencode(state | long | {'prompt_tokens': '60'})}")
    is_computing = """
    const hidden = !document.querySelector('#plan').checkVisibility();
    return hidden && document.querySelector('#computing').innerText.includes('Computing');
    """
    sees(lambda: plans.execute_script(is_computing))
    plans.execute_script("arguments[0].value = ''", find(plans, "[name=tpot_ms]"))
    plans.execute_script("arguments[0].value = '2'", find(plans, "[name=max_concurrency]"))
    answers = find(plans, "[name=new_tokens]")
    answers.clear()
    answers.send_keys("5")
    sees(lambda: says(plans, "#answer", "holds it for"))
    assert not find(plans, "#computing").is_displayed()
    assert texts(plans, "#problem") == [""]
    assert len(rows(plans, "choices")) > 3
    find(plans, "[name=request_rate]").send_keys("1")
    sees(lambda: says(plans, "#problem", "request_rate says how requests arrive"))
    assert not find(plans, "#computing").is_displayed()


def test_downloads(planner: Served, tmp_path: Path) -> None:
    preferences = {"download.default_directory": str(tmp_path / "files")}
    with browsing(tmp_path / "profile", preferences=preferences) as browser:
        browser.get(f"{planner.url}/plan")
        sees(lambda: says(browser, "#answer", "It fits"))
        names = ("plan.json", "plan.csv", "plan.md", "plan.svg")
        files = [tmp_path / "files" / name for name in names]
        buttons = browser.find_elements(By.CSS_SELECTOR, "#buttons button")
        for button, file in zip(buttons, files, strict=True):  # the browser takes one at a time
            button.click()
            sees(file.exists)
        assert json.loads(files[0].read_text())["model"]["name"] == "tiny"
        assert files[1].read_text().startswith("device,")
        assert files[2].read_text().startswith("# Memory of tiny")
        assert re.match(r"<svg .*", files[3].read_text())


def test_a_phone_shows_all_without_scrolling_sideways(plans: Chrome) -> None:
    give(plans, "deepseek-v3", on="l4,h100-sxm,b200", context="4096")
    set_size(plans, PHONE)
    try:
        assert plans.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
        for part in ("#answer", "#bar", "[name=on]"):
            assert find(plans, part).is_displayed()
        give(plans, "gemma-3-1b", on="l4", **LOAD, **BOUNDS)
        assert plans.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
        assert find(plans, "#picture svg").is_displayed()
    finally:
        set_size(plans, DESK)


def test_a_key_is_asked_for(model: Path, tmp_path: Path) -> None:
    with serving(model, api_key=["open sesame"]) as served, browsing(tmp_path) as browser:
        browser.get(f"{served.url}/plan")
        sees(lambda: find(browser, "#key-dialog").is_displayed())
        find(browser, "#key-dialog input").send_keys("open sesame" + Keys.ENTER)
        sees(lambda: says(browser, "#answer", "It fits"))


def test_what_to_buy_is_shown_with_price_and_power(plans: Chrome, planner: Served) -> None:
    give(plans, "llama-3.1-8b", on="rtx3090,dgx-spark", buy="yes", max_concurrency="2")
    found = ask(
        planner, model=config("llama-3.1-8b"), on="rtx3090,dgx-spark", buy=True, max_concurrency=2
    )
    assert texts(plans, "#choices-head th")[1:4] == ["USD to buy", "most W", "USD/Mtok"]
    first, shown = found["choices"][0], rows(plans, "choices")
    name, cells = next(iter(shown.items()))
    assert name.startswith(f"{first['num_devices']} x {first['device']}")
    assert any(one.startswith("1 x rtx3090 in 1 PC") for one in shown)
    assert cells[0] == f"{first['purchase']['usd']:,.0f}"
    assert cells[1] == f"{first['purchase']['watts']:,.0f}"
    assert find(plans, "#picture svg").is_displayed()


def test_clients_at_a_time_without_a_bound_are_not_said_to_be_held(plans: Chrome) -> None:
    lengths = {"prompt_tokens": "300", "new_tokens": "40", "max_concurrency": "2"}
    give(plans, "llama-3.1-8b", on="l4", **lengths)
    assert set(texts(plans, "#choices .holds")) == {"\N{EN DASH}"}
    give(plans, "llama-3.1-8b", on="l4", ttft_ms="60000", **lengths)
    assert "surely" in " ".join(texts(plans, "#choices .holds"))
