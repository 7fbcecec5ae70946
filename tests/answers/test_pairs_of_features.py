"""Features in pairs: what an engine has, and what requests ask for, two at a time and all at once.

Each feature has tests of its own. What these look for is a feature that spoils another: random
requests with any two wishes must have the answers that they have alone in a plain engine, in
engines with any two of the options that promise the same answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ridgeline import LLM, SamplingParams, StructuredOutputsParams
from tests.engine.test_llm import model
from tests.lora import llama_shapes, random_pairs, write_peft
from tests.model.files.tiny import CONFIG

__all__ = ["model"]  # a fixture

BASE = {"threads": 1, "enable_contrastive_search": True, "speculative_config": "off"}
ROOM = "256KiB"  # so few blocks that sequences are preempted
NUM_REQUESTS = 12

# What may be asked of one request; of two that contradict each other the later one holds.
WISHES: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 0.9, "top_p": 0.95},
    "several": {"n": 3, "temperature": 1.0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "dry_multiplier": 0.8},
    "xtc": {"temperature": 1.0, "xtc_probability": 0.5, "min_p": 0.01},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 1},
    "form": {"structured_outputs": StructuredOutputsParams(regex="[a-h ]{6,14}")},
    "choice": {"structured_outputs": StructuredOutputsParams(choice=["hello cat", "hello dog"])},
    "stop": {"stop": ["e", "q"]},
    "bad words": {"bad_words": ["a", "the"]},
    "prediction": {"prediction": "hello to the cat and the dog and the cat"},
    "beams": {"use_beam_search": True, "n": 2, "best_of": 3, "temperature": 0.0},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4, "temperature": 0.0},
}
SEARCHES = ("beams", "contrastive")  # which take logprobs beside them, and nothing else

Options = dict[str, Any]
Feature = Callable[[Path, Path], Options]

# What an engine may have: options made of a new folder, and of the folder of models.
FEATURES: dict[str, Feature] = {
    "stages": lambda _, __: {"stages": 2},
    "chunks": lambda _, __: {"max_num_batched_tokens": 24, "max_num_seqs": 16},
    "few blocks": lambda _, __: {"kv_cache_memory": ROOM},
    "disk": lambda own, _: {"kv_disk": f"{own / 'kv'}:64MiB", "kv_disk_min": 16},
    "lookup": lambda _, __: {"speculative_config": {"method": "ngram", "always": True}},
    "draft model": lambda _, models: {
        "speculative_config": {
            "method": "draft_model",
            "model": str(models / "small"),
            "always": True,
            "num_speculative_tokens": 3,
        }
    },
    "adapter": lambda _, models: {"lora": {"a": models / "adapter"}},
    "orca": lambda _, __: {"policy": "orca"},
    "threads": lambda _, __: {"threads": 2},
    "no prefixes": lambda _, __: {"enable_prefix_caching": False},
}
# Those that an engine refuses together, by name (the refusals have tests of their own).
REFUSED = {("stages", "disk"), ("stages", "adapter"), ("chunks", "orca"), ("disk", "no prefixes")}
PAIRS = [
    pair
    for pair in combinations(FEATURES, 2)
    if pair not in REFUSED and pair != ("lookup", "draft model")
]
QUICK = (
    ("stages", "few blocks"),
    ("stages", "draft model"),
    ("chunks", "lookup"),
    ("few blocks", "disk"),
    ("disk", "adapter"),
)


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, a draft model that is often right, and an adapter."""
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("model", "small"):
        (folder / name).mkdir()
        for file in model.iterdir():
            (folder / name / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "small" / "model.safetensors")
    dice = np.random.default_rng(5)
    for name, values in weights.items():
        if "mlp" in name:
            values *= 1 + dice.normal(0, 0.05, values.shape).astype(values.dtype)
    save_file(weights, folder / "small" / "model.safetensors")
    config = json.loads((folder / "model" / "config.json").read_text())
    write_peft(folder / "adapter", random_pairs(llama_shapes(CONFIG | config)), lora_alpha=4)
    return folder


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts, some with a beginning in common, and what is asked of each."""
    dice = Random(seed)
    shared = [dice.randrange(1, 400) for _ in range(40)]
    found = []
    for _ in range(NUM_REQUESTS):
        first, second = dice.sample(sorted(WISHES), 2)
        wishes = WISHES[first] | WISHES[second]
        if searches := [one for one in (first, second) if one in SEARCHES]:
            logprobs = WISHES["logprobs"] if "logprobs" in (first, second) else {}
            wishes = WISHES[searches[0]] | logprobs
        own = [dice.randrange(1, 400) for _ in range(dice.randrange(1, 20))]
        prompt = shared[: dice.choice((0, 0, 17, 33, 40))] + own
        ends = dice.random() < 0.5 or "structured_outputs" in wishes
        found.append(
            (
                prompt,
                SamplingParams(
                    max_tokens=dice.randrange(2, 16),
                    ignore_eos=not ends,
                    seed=dice.randrange(1 << 30),
                    **({"temperature": 0.0} | wishes),
                ),
            )
        )
    return found


def told(out: Any) -> Any:
    """What is said of a request, but for how much of it was cached or guessed."""
    answers = [
        (one.token_ids, one.text, one.logprobs, one.finish_reason, one.stop_reason)
        for one in out.outputs
    ]
    return answers, out.prompt_logprobs


def names_of(options: Options, count: int) -> list[str | None]:
    """Return the adapter of each request: each second one has it where there is one."""
    return ["a" if "lora" in options and i % 2 else None for i in range(count)]


@pytest.mark.parametrize(
    "pair",
    [pytest.param(p, marks=() if p in QUICK else pytest.mark.full) for p in PAIRS],
    ids=" and ".join,
)
def test_two_features_spoil_nothing(models: Path, tmp_path: Path, pair: tuple[str, str]) -> None:
    options: Options = dict(BASE, kv_cache_memory="1MiB")
    for name in pair:
        options |= FEATURES[name](tmp_path, models)
    adapters = {"lora": options["lora"]} if "lora" in options else {}
    rounds = [requests(hash_of(pair) + i) for i in range(2)]
    with LLM(models / "model", **BASE, kv_cache_memory="1MiB", **adapters) as plain:
        wanted = [
            [
                told(plain.generate([prompt], params, lora_request=name)[0])
                for (prompt, params), name in zip(asked, names_of(options, len(asked)), strict=True)
            ]
            for asked in rounds
        ]
    with LLM(models / "model", **options) as llm:
        for asked, expected in zip(rounds, wanted, strict=True):
            for _ in range(2):  # the second time prefixes are known
                outs = llm.generate(
                    [prompt for prompt, _ in asked],
                    [params for _, params in asked],
                    lora_request=names_of(options, len(asked)),
                    progress=False,
                )
                for (prompt, params), out, right in zip(asked, outs, expected, strict=True):
                    assert told(out) == right, (prompt, params)
        llm.engine.check()


def hash_of(pair: tuple[str, str]) -> int:
    """Return a number that is the same in every run."""
    return sum(ord(letter) << (i % 24) for i, letter in enumerate("".join(pair)))
