"""Adapters of ``LLM``: by name, many in one batch, loaded and unloaded while requests run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ridgeline import LLM, LoRARequest, SamplingParams
from ridgeline.core.records import Record, RequestRecord
from tests.engine.test_llm import VOCAB, assert_idle, write_model
from tests.lora import llama_shapes, merged, random_pairs, write_peft
from tests.model.files.tiny import CONFIG

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
PROMPT = "the cat and the dog said hello to the cat"
BASE = {"kv_cache_memory": "1MiB", "threads": 1}
SHAPES = llama_shapes(CONFIG)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, three adapters of it, and the first of them merged into the model."""
    folder = tmp_path_factory.mktemp("lora")
    model = write_model(folder / "model")
    for i, name in enumerate(("a", "b", "c")):
        write_peft(folder / name, random_pairs(SHAPES, 4 + i, seed=i), lora_alpha=4 + i)
    whole = write_model(folder / "merged")
    raw = load_file(model / "model.safetensors")
    save_file(merged(raw, random_pairs(SHAPES, 4, seed=0), 1.0), whole / "model.safetensors")
    return folder


def load(files: Path, *names: str, model: str = "model", **options: Any) -> LLM:
    lora = {name: files / name for name in names}
    return LLM(files / model, **BASE | {"lora": lora or None} | options)


@pytest.fixture(scope="module", params=["cpu", "reference"])
def shared(files: Path, request: pytest.FixtureRequest) -> LLM:
    return load(files, "a", "b", backend=request.param)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_idle(shared)
    assert shared.adapters.in_use == {}


def answer(llm: LLM, name: str | None = None, params: SamplingParams = GREEDY) -> Any:
    return llm.generate(PROMPT, params, lora_request=name)[0].outputs[0]


def test_an_adapter_answers_as_the_merged_model(files: Path, llm: LLM) -> None:
    exact = {"dtype": "f32", "kv_cache_dtype": "f32", "backend": llm.config.backend}
    adapted, whole = load(files, "a", **exact), load(files, model="merged", **exact)
    found, wanted = answer(adapted, "a"), answer(whole)
    assert found.token_ids == wanted.token_ids
    for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert ours.keys() == theirs.keys()
        for token, rank in ours.items():
            assert abs(rank.logprob - theirs[token].logprob) < 1e-3
    assert answer(adapted).token_ids != found.token_ids


def test_each_prompt_of_a_batch_has_its_own_and_back(llm: LLM) -> None:
    alone = {name: answer(llm, name) for name in (None, "a", "b")}
    assert len({one.token_ids for one in alone.values()}) == 3
    names = ["a", None, "b", "b", None, "a"]
    outs = llm.generate([PROMPT] * 6, GREEDY, lora_request=names)
    for name, out in zip(names, outs, strict=True):
        assert out.outputs[0].token_ids == alone[name].token_ids
    assert answer(llm) == alone[None]


def test_chat_and_streams_take_it_too(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    texts = {
        "".join(chunk.text for chunk in llm.stream(chat, GREEDY, lora_request=name))
        for name in (None, "a", "b")
    }
    assert {
        llm.chat(chat, GREEDY, lora_request=n)[0].outputs[0].text for n in (None, "a", "b")
    } == (texts)
    assert len(texts) == 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=6, n=3, use_beam_search=True, temperature=0),
        SamplingParams(max_tokens=8, penalty_alpha=0.6, top_k=4, temperature=0),
        SamplingParams(max_tokens=8, n=3, temperature=0.9, seed=5),
    ],
    ids=["beams", "contrastive", "samples"],
)
def test_searches_and_samples_are_those_of_the_merged_model(
    files: Path, llm: LLM, params: SamplingParams
) -> None:
    exact = {"dtype": "f32", "kv_cache_dtype": "f32", "backend": llm.config.backend}
    adapted, whole = load(files, "a", **exact), load(files, model="merged", **exact)
    found = adapted.generate(PROMPT, params, lora_request="a")[0].outputs
    assert [one.token_ids for one in found] == [
        one.token_ids for one in whole.generate(PROMPT, params)[0].outputs
    ]


def test_drafts_change_no_answer(files: Path) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4, "always": True}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompt = list(range(50, 60)) * 4
    found = []
    for speculative in ("off", config):
        llm = load(files, "a", speculative_config=speculative)
        found.append(llm.generate(prompt, params, lora_request="a")[0])
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids
    assert found[1].num_draft_tokens > 0


def test_a_draft_model_guesses_for_an_adapter(files: Path) -> None:
    plain = load(files, "a", speculative_config="off")
    config = {"method": "draft_model", "model": str(files / "merged"), "always": True}
    drafted = load(files, "a", speculative_config=config | {"num_speculative_tokens": 3})
    out = drafted.generate(PROMPT, GREEDY, lora_request="a")[0]
    assert out.outputs[0].token_ids == answer(plain, "a").token_ids
    assert out.num_accepted_tokens > 0


def test_cuts_and_preemption_change_no_answer(files: Path) -> None:
    """Prompts in pieces, and a cache that does not hold all: each answer is as it was alone."""
    prompts = [[50 + i] * (20 + 7 * i) for i in range(6)]
    names = ["a", None, "b", "a", "b", None]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    roomy = load(files, "a", "b")
    alone = [
        roomy.generate(prompt, params, lora_request=name)[0].outputs[0].token_ids
        for prompt, name in zip(prompts, names, strict=True)
    ]
    records: list[Record] = []
    tight = load(files, "a", "b", kv_cache_memory="30KiB", max_num_batched_tokens=16,
                 max_num_seqs=6, threads=2, max_model_len=96)  # fmt: skip
    tight.engine.listeners.append(records.append)
    outs = tight.generate(prompts, params, lora_request=names)
    assert [out.outputs[0].token_ids for out in outs] == alone
    ended = [record for record in records if isinstance(record, RequestRecord)]
    assert sum(record.num_preemptions for record in ended) > 0
    assert len({record.adapter for record in ended}) == 3


def test_prefixes_do_not_cross(llm: LLM) -> None:
    prompt = list(np.random.default_rng(3).integers(40, VOCAB - 20, 40))
    prompt = [int(token) for token in prompt]
    found = [
        llm.generate(prompt, GREEDY, lora_request=name)[0].num_cached_tokens
        for name in (None, "a", "b", "a", None)
    ]
    assert found == [0, 0, 0, 32, 32]


def test_who_is_not_there_is_said_before_anything_runs(files: Path, llm: LLM) -> None:
    with pytest.raises(ValueError, match="no adapter 'z'; loaded: a, b"):
        answer(llm, "z")
    with pytest.raises(ValueError, match="2 prompts, but 1 lora_request"):
        llm.generate(["x", "y"], GREEDY, lora_request=["a"])
    with pytest.raises(ValueError, match="must be the name of an adapter, not 3"):
        llm.generate(["x"], GREEDY, lora_request=[3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="there is an adapter 'a' already"):
        llm.adapters.load("a", files / "a")
    with pytest.raises(ValueError, match=r"rank 6, .* --max-lora-rank 6$"):
        llm.adapters.load("c", files / "c")


def test_options_are_checked_at_the_edge(files: Path) -> None:
    for lora, message in (
        (["a"], "--lora is 'a=': write NAME=PATH"),
        (["=x"], "--lora is '=x': write NAME=PATH"),
        (["a=x", "a=y"], "two adapters are named 'a'"),
        ([f"a={files}/nothing"], "no such adapter"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(files / "model", **BASE, lora=lora)
    with pytest.raises(ValueError, match=r"--max-lora-rank 4$"):
        load(files, "a", max_lora_rank=3)
    with pytest.raises(ValueError, match=r"room for 0.*--max-lora-rank 4 and --enable-lora"):
        load(files).adapters.load("a", files / "a")


def test_vllms_request_loads_what_it_names(files: Path) -> None:
    llm = load(files, enable_lora=True)
    wish = LoRARequest("b", 1, str(files / "b"))
    first, again = (llm.generate(PROMPT, GREEDY, lora_request=wish)[0] for _ in range(2))
    assert first.outputs[0].token_ids == answer(load(files, "b"), "b").token_ids
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert llm.adapters.names == ["b"]
    assert llm.config.max_lora_rank == 64


def test_another_objects_name_and_path_count_and_anything_else_is_named(files: Path) -> None:
    """vLLM's own class is no class of ours."""
    llm = load(files, enable_lora=True)
    theirs: Any = SimpleNamespace(lora_name="b", lora_int_id=1, lora_path=str(files / "b"))
    one = llm.generate(PROMPT, GREEDY, lora_request=theirs)[0]
    each = llm.generate([PROMPT], GREEDY, lora_request=[theirs])[0]
    wanted = answer(load(files, "b"), "b").token_ids
    assert one.outputs[0].token_ids == each.outputs[0].token_ids == wanted
    wrong: Any = object()
    with pytest.raises(ValueError, match="lora_request must be the name of an adapter, a LoRA"):
        llm.generate(PROMPT, GREEDY, lora_request=wrong)


def test_unloading_lets_requests_under_way_finish(files: Path) -> None:
    llm = load(files, "a")
    wanted = answer(llm, "a").text
    chunks = llm.stream(PROMPT, GREEDY, lora_request="a")
    text = next(chunks).text
    llm.adapters.unload("a")
    assert (llm.adapters.names, llm.adapters.num_bytes > 0) == ([], True)
    with pytest.raises(ValueError, match="no adapter 'a'; loaded: none"):
        answer(llm, "a")
    assert text + "".join(chunk.text for chunk in chunks) == wanted
    assert llm.adapters.num_bytes == 0
    llm.adapters.load("a", files / "a")
    assert answer(llm, "a").text == wanted


def test_the_one_used_longest_ago_goes_first_and_none_in_use(files: Path) -> None:
    sizes = [load(files, name).adapters.num_bytes for name in ("a", "b", "c")]
    llm = load(files, enable_lora=True, lora_memory=sum(sizes[1:]))
    wanted = {name: answer(load(files, name), name).token_ids for name in ("a", "b", "c")}
    for name in ("a", "b", "c"):  # a must go for c
        llm.adapters.load(name, files / name)
    assert llm.adapters.num_bytes == sum(sizes[1:])
    assert answer(llm, "b").token_ids == wanted["b"]
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    chunks = llm.stream(PROMPT, long, lora_request="b")
    next(chunks)
    (number,) = {request.adapter.number for request in llm.engine.requests.values()}
    for name in ("a", "c", "a"):  # each is read again, in the other's place, beside b
        assert answer(llm, name).token_ids == wanted[name]
        assert llm.adapters.in_use == {"b": 1}
    assert llm.adapters.lease("b").number == number  # nobody has read it again
    others = llm.stream(PROMPT, long, lora_request="a")
    next(others)
    with pytest.raises(ValueError, match=r"those in use take \d+ of \d+ \(--lora-memory\)"):
        answer(llm, "c")
    chunks.close()
    others.close()
    assert answer(llm, "c").token_ids == wanted["c"]


def test_to_be_used_is_to_stay(files: Path) -> None:
    sizes = [load(files, name).adapters.num_bytes for name in ("a", "b", "c")]
    llm = load(files, enable_lora=True, lora_memory=sum(sizes))
    numbers = {}
    for name in ("a", "b"):
        llm.adapters.load(name, files / name)
        numbers[name] = llm.adapters.lease(name).number
    answer(llm, "a")
    llm.adapters.load("c", files / "c")
    llm.adapters.load("again", files / "c")  # for which one must go
    assert llm.adapters.lease("a").number == numbers["a"]
    assert llm.adapters.lease("b").number != numbers["b"]


def test_memory_has_a_line_for_adapters(files: Path) -> None:
    llm = load(files, "a")
    (line,) = [line for line in llm.memory().lines if line.name == "adapters"]
    assert line.num_bytes == llm.adapters.num_bytes
