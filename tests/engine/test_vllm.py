"""What vLLM's users type: prompts, options, names; and several prompts of which some are wrong."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ridgeline
from ridgeline import (
    LLM,
    BeamSearchParams,
    Counter,
    EngineArgs,
    FlexibleArgumentParser,
    Gauge,
    Histogram,
    PoolingParams,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
    Vector,
    print_embeddings,
)
from ridgeline.engine import requests
from ridgeline.engine.setup.progress import count_lines
from ridgeline.engine.vllm import taken
from tests.engine.test_llm import GREEDY, assert_idle, model  # noqa: F401  (a fixture)
from tests.waiting import PATIENCE_S

SMALL: dict[str, Any] = {"kv_cache_memory": "1MiB", "threads": 1}
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def shared(model: Path) -> LLM:  # noqa: F811
    return LLM(model, **SMALL)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_idle(shared)


def texts(outputs: list[ridgeline.RequestOutput]) -> list[str]:
    return [out.outputs[0].text for out in outputs]


def test_a_prompt_has_many_forms(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    plain: Any = "Hello"
    forms: list[Any] = [
        plain,
        ids,
        TextPrompt(prompt="Hello"),
        TokensPrompt(prompt_token_ids=ids),
        {"prompt": "Hello", "prompt_token_ids": ids, "multi_modal_data": None},
    ]
    expected = texts(llm.generate(plain, GREEDY))
    assert texts(llm.generate(forms, GREEDY)) == expected * len(forms)
    for form in forms:
        assert texts(llm.generate(form, GREEDY)) == expected
        assert "".join(chunk.text for chunk in llm.stream(form, GREEDY)) == expected[0]
    assert [out.prompt for out in llm.generate(forms, GREEDY)] == [
        "Hello", None, "Hello", None, "Hello",
    ]  # fmt: skip


def test_messages_are_a_prompt(llm: LLM) -> None:
    expected = texts(llm.chat(CHAT, GREEDY))
    assert texts(llm.generate(CHAT, GREEDY)) == expected
    assert texts(llm.generate([CHAT, "Hello", CHAT], GREEDY))[::2] == expected * 2
    assert texts(llm.chat([CHAT, CHAT], GREEDY, use_tqdm=False)) == expected * 2
    assert texts(llm.chat(CHAT, GREEDY, chat_template_kwargs={"other": 1})) == expected


WRONG: list[tuple[Any, str]] = [
    ("", "the prompt is empty"),
    ([], "the prompt is empty"),
    ([1 << 40], "ids are 0 to"),
    ({}, "this one has neither"),
    ({"prompt": "a", "multi_modal_data": {"image": 1}}, "has 'multi_modal_data'"),
    ({"prompt_embeds": np.zeros((2, 8))}, "has 'prompt_embeds'"),
    ({"prompt": 3}, "must be text or a list of token ids"),
    ([{"role": "user"}], "content"),
    ([40] * 5000, "the prompt has 5000 tokens"),
    (None, "must be text or a list of token ids"),
]


@pytest.mark.parametrize(("prompt", "reason"), WRONG, ids=lambda case: str(case)[:20])
def test_which_prompt_is_wrong_is_said_and_nothing_is_computed(
    llm: LLM, prompt: Any, reason: str
) -> None:
    before = llm.engine._next_id
    for call in (llm.generate, llm.generate_as_completed, llm.stream_many):
        with pytest.raises(ValueError, match="prompt 2: ") as caught:
            call(["Hello", CHAT, prompt, "there"], GREEDY)
        assert reason in str(caught.value)
        assert not llm.engine.requests
    if not isinstance(prompt, list | None) or prompt:
        with pytest.raises(ValueError) as alone:  # noqa: PT011
            llm.generate(prompt, GREEDY)
        assert "prompt 0:" not in str(alone.value)
    assert llm.engine._next_id - before <= 9


def test_a_list_of_vectors_for_prompts_is_no_conversation(llm: LLM) -> None:
    vectors: Any = {"prompt_embeds": np.zeros((2, 8))}
    for prompts in (vectors, [vectors], [vectors, vectors]):
        with pytest.raises(ValueError, match=r"this one has 'prompt_embeds'$"):
            llm.generate(prompts, GREEDY)


def test_the_others_are_answered_on_request(llm: LLM) -> None:
    prompts: list[Any] = ["Hello", *[prompt for prompt, _ in WRONG], "there"]
    outputs = llm.generate(prompts, GREEDY, return_errors=True)
    good = texts(llm.generate(["Hello", "there"], GREEDY))
    assert [outputs[0].outputs[0].text, outputs[-1].outputs[0].text] == good
    for out, (_, reason) in zip(outputs[1:-1], WRONG, strict=True):
        (answer,) = out.outputs
        assert (answer.finish_reason, answer.text, answer.token_ids) == ("error", "", ())
        assert reason in str(answer.error)
    conversations: list[Any] = [CHAT, [{"role": "user"}]]
    answers = [out.outputs[0] for out in llm.chat(conversations, GREEDY, return_errors=True)]
    assert [answer.finish_reason for answer in answers] == ["length", "error"]


def test_answers_come_as_they_end(llm: LLM) -> None:
    lengths = [30, 2, 10, 4]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    found = list(llm.generate_as_completed(["a"] * 4, params))
    assert [i for i, _ in found] == [1, 3, 2, 0]
    assert [len(out.outputs[0].token_ids) for _, out in found] == sorted(lengths)
    several = llm.generate_as_completed(
        ["a", "b"], [SamplingParams(n=3, max_tokens=9, seed=1), params[1]]
    )
    assert {i: len(out.outputs) for i, out in several} == {0: 3, 1: 1}


def test_who_has_enough_ends_the_rest(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n + 2, ignore_eos=True) for n in range(9)]
    running = llm.generate_as_completed(["a"] * 9, params)
    assert next(running)
    assert llm.engine.requests
    running.close()  # type: ignore[attr-defined]
    assert not llm.engine.requests
    llm.generate_as_completed(["a"] * 9, GREEDY)  # and who does not even begin
    assert not llm.engine.requests


def test_progress_is_lines_where_there_is_no_terminal(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.engine.setup.progress._LINE_S", 0.0)
    llm.generate(["a", "b"], GREEDY)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "Answering: 2 of 2, about 0 s left"
    for quiet in ({"use_tqdm": False}, {"progress": False}, {"progress": False, "use_tqdm": True}):
        llm.generate(["a", "b"], GREEDY, **quiet)  # type: ignore[arg-type]
    assert not capsys.readouterr().err
    llm.generate("a", GREEDY, use_tqdm=True)
    assert capsys.readouterr().err
    assert requests.count_bar


def test_lines_of_progress_come_every_ten_seconds_and_say_what_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0
    report = count_lines("Answering", lambda: now_s)
    for step in range(8):
        now_s = 4.0 * step
        report(100 * step, 10_000)
    assert capsys.readouterr().err.splitlines() == [
        "Answering: 300 of 10,000, about 6 min left",
        "Answering: 600 of 10,000, about 6 min left",
    ]


def test_the_tokenizer_has_the_methods_that_people_call(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Hello")
    assert tokenizer.decode(ids) == "Hello"
    assert tokenizer.decode(ids[0]) == llm.tokenizer.decode(ids[:1])
    assert (len(tokenizer), tokenizer.eos_token_id) == (llm.tokenizer.vocab_size, 0)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)  # type: ignore[assignment]
    assert isinstance(text, str)
    assert "Hello" in text
    assert texts(llm.generate([ids], GREEDY)) == texts(llm.chat(CHAT, GREEDY))


def test_the_tokenizer_knows_how_tokens_are_written(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    rows = tokenizer(["Hello", "there"])
    assert rows["input_ids"] == [tokenizer("Hello")["input_ids"], tokenizer.encode("there")]
    assert [len(row) for row in rows["attention_mask"]] == [len(r) for r in rows["input_ids"]]
    assert tokenizer.batch_decode(rows["input_ids"]) == ["Hello", "there"]
    assert tokenizer.eos_token is not None
    assert tokenizer.convert_tokens_to_ids(tokenizer.eos_token) == tokenizer.eos_token_id
    assert tokenizer.encode(tokenizer.eos_token, add_special_tokens=False) == [0]
    ids = [*range(len(tokenizer)), len(tokenizer)]
    written = tokenizer.convert_ids_to_tokens(ids)
    assert isinstance(written, list)
    assert written[-1] is None
    assert tokenizer.convert_tokens_to_ids([w for w in written if w is not None]) == ids[:-1]
    assert tokenizer.convert_tokens_to_ids("no such token") is None
    assert tokenizer.get_vocab()[written[5] or ""] == tokenizer.convert_tokens_to_ids(written[5])
    assert tokenizer.chat_template == llm.text.chat_template.source


def test_parameters_are_changed_by_assignment_and_a_prompt_takes_a_copy(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.min_tokens = 3  # more than max_tokens is now, which comes next
    params.max_tokens = 4
    params.temperature = 0.0
    params.stop = "never"
    assert params.stop == ("never",)
    copied = params.clone()
    copied.n, copied.temperature, copied.seed = 2, 1.0, 5
    assert (params.n, params.seed) == (1, None)
    streaming = llm.stream("Hello", params)
    params.max_tokens = 1
    assert sum(chunk.token_id is not None for chunk in streaming) == 4
    (out,) = llm.generate("Hello", copied, use_tqdm=False)
    assert len(out.outputs) == 2
    assert out.finished
    with pytest.raises(ValueError, match="min_tokens is 3: over max_tokens 1"):
        llm.generate("Hello", params)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("temperature", -1, "temperature is -1"),
        ("n", 1.5, "n must be a whole number"),
        ("stop", [3], "stop must be one or more non-empty strings"),
        ("structured_outputs", 3, "structured_outputs must be StructuredOutputsParams"),
    ],
)
def test_an_assigned_value_is_checked_at_once(name: str, value: Any, reason: str) -> None:
    params = SamplingParams(max_tokens=3, seed=1)
    with pytest.raises(ValueError, match=reason):
        setattr(params, name, value)
    assert params == SamplingParams(max_tokens=3, seed=1)


def test_a_parameter_that_there_is_not_cannot_be_assigned() -> None:
    with pytest.raises(AttributeError, match="SamplingParams has no 'max_token'"):
        SamplingParams().max_token = 3  # type: ignore[attr-defined]


def test_parameters_without_effect_are_taken() -> None:
    made = SamplingParams.from_optional(
        n=None, max_tokens=3, spaces_between_special_tokens=False, extra_args={"a": 1}
    )
    assert made == SamplingParams(max_tokens=3)
    assert made != SamplingParams(max_tokens=4)


def test_a_conversation_can_be_written_by_another_template(llm: LLM) -> None:
    other = "{% for m in messages %}{{ m.content }}!{% endfor %}{{ mood }}"
    (out,) = llm.chat(CHAT, GREEDY, chat_template=other, chat_template_kwargs={"mood": "so"})
    assert out.prompt_token_ids == llm.tokenizer.encode("Hello!so")
    (own,) = llm.chat(CHAT, GREEDY)
    assert own.prompt_token_ids != out.prompt_token_ids
    with pytest.raises(TypeError, match="chat_templates"):
        llm.chat(CHAT, GREEDY, chat_templates=other)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="chat_template_content_format is 'xml'"):
        llm.chat(CHAT, GREEDY, chat_template_content_format="xml")  # type: ignore[arg-type]


def test_tools_are_an_argument(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    names = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}!"
    for tools, written in (([tool, tool], "looklook!"), (None, "!")):
        (out,) = llm.chat(CHAT, GREEDY, tools=tools, chat_template=names)
        assert out.prompt_token_ids == llm.tokenizer.encode(written)


def test_a_prefix_can_be_forgotten(llm: LLM) -> None:
    ids = list(range(300, 340))
    for forgets, cached in ((False, 0), (False, 32), (True, 0)):
        if forgets:
            assert llm.reset_prefix_cache()
        (out,) = llm.generate([ids], GREEDY)
        assert out.num_cached_tokens == cached
    stream = llm.stream([*ids, 7], GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="1 requests run"):
        llm.reset_prefix_cache()
    stream.close()


def test_flags_of_a_program_become_options() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(runner="pooling", enforce_eager=True)
    typed = "--model m --max_model_len=64 --block-size 8 --no-enable-prefix-caching --dtype half"
    found = taken(**_by_name(vars(parser.parse_args(typed.split()))))
    assert found == (
        "m",
        {"max_model_len": 64, "block_size": 8, "enable_prefix_caching": False, "dtype": "auto"},
        ["nothing here depends on enforce_eager, runner"],
    )


def _by_name(options: dict[str, Any]) -> dict[str, Any]:
    rest = dict(
        sorted(options.items(), key=lambda item: item[0] not in ("enforce_eager", "runner"))
    )
    return {"model": rest.pop("model"), "given": rest}


def test_beams_come_by_vllms_names(llm: LLM) -> None:
    (found,) = llm.beam_search("Hello", BeamSearchParams(beam_width=3, max_tokens=5))
    ours = SamplingParams(use_beam_search=True, n=3, best_of=3, max_tokens=5, temperature=0)
    (expected,) = llm.generate("Hello", ours)
    assert [beam.text for beam in found.sequences] == ["Hello" + o.text for o in expected.outputs]
    best = found.sequences[0]
    assert best.tokens == [*expected.prompt_token_ids, *expected.outputs[0].token_ids]
    assert best.cum_logprob < 0
    with pytest.raises(ValueError, match="temperature"):
        llm.beam_search("Hello", BeamSearchParams(beam_width=2, max_tokens=5, temperature=0.5))


def test_encode_returns_vectors(llm: LLM) -> None:
    encoded = llm.encode(["one", {"prompt": "two"}], use_tqdm=False)
    embedded = llm.embed(["one", "two"])
    assert [out.outputs.data.tolist() for out in encoded] == [
        out.outputs.embedding for out in embedded
    ]
    assert llm.get_default_sampling_params() == llm.default_params()
    assert llm.encode("one", pooling_task="embed")[0].finished
    with pytest.raises(ValueError, match="pooling_task is 'classify'"):
        llm.encode("one", pooling_task="classify")


def test_what_was_counted_agrees_with_the_answers(model: Path) -> None:  # noqa: F811
    with LLM(model, disable_log_stats=False, **SMALL) as counting:
        few = SamplingParams(temperature=0, max_tokens=7, n=2, ignore_eos=True)
        outs = counting.generate(["Hello"] * 3, few, use_tqdm=False)
        found = counting.get_metrics()
    assert {type(one) for one in found} == {Counter, Gauge, Histogram, Vector}
    counted = {one.name: one.value for one in found if isinstance(one, Counter) and not one.labels}
    assert counted["ridgeline:prompt_tokens"] == sum(len(out.prompt_token_ids) for out in outs)
    assert counted["ridgeline:generation_tokens"] == 3 * 2 * 7
    ends = {one.labels["finished_reason"]: one for one in found if one.labels}
    assert isinstance(ends["length"], Counter)
    assert ends["length"].value == 3 * 2
    gauges = {one.name: one.value for one in found if isinstance(one, Gauge)}
    assert gauges["ridgeline:num_requests_running"] == 0
    spreads = {one.name: one for one in found if isinstance(one, Histogram)}
    spread = spreads["ridgeline:request_generation_tokens"]
    assert (spread.count, spread.sum, spread.buckets["+Inf"]) == (6, 42.0, 6)
    assert (spread.buckets["1.0"], spread.buckets["8.0"]) == (0, 6)
    assert sorted(spread.buckets.values()) == list(spread.buckets.values())


def test_drafts_that_were_right_are_counted_by_place(model: Path) -> None:  # noqa: F811
    drafting = {"speculative_config": {"num_speculative_tokens": 3, "always": True}}
    with LLM(model, disable_log_stats=False, **SMALL, **drafting) as counting:
        one_word = SamplingParams(temperature=0, max_tokens=40, allowed_token_ids=[5])
        counting.generate([[5] * 9], one_word)
        found = {one.name.removeprefix("ridgeline:"): one for one in counting.get_metrics()}
    places, total = (found[f"spec_decode_num_accepted_tokens{s}"] for s in ("_per_pos", ""))
    assert isinstance(places, Vector)
    assert isinstance(total, Counter)
    assert sum(places.values) == total.value
    assert places.values == sorted(places.values, reverse=True)
    assert total.value > 0


def test_what_vllm_has_and_this_has_not_names_the_way_out(llm: LLM) -> None:
    for name, instead in {
        "classify": "choice",
        "start_profile": r"trace=FILE.*ridgeline explain",
        "collective_rpc": "one process",
    }.items():
        assert not hasattr(llm, name)
        with pytest.raises(AttributeError, match=rf"^LLM has no '{name}': .*{instead}"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match=r"^LLM has no 'zzz'$"):
        llm.zzz  # noqa: B018
    with pytest.raises(ValueError, match="disable_log_stats=False"):
        llm.get_metrics()


def test_vectors_by_vllms_parameters(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    wishes = PoolingParams(dimensions=3, use_activation=False)
    (out,) = llm.embed("one", pooling_params=wishes)
    assert out == replace(
        llm.embed("one", dimensions=3, normalize=False)[0], request_id=out.request_id
    )
    with pytest.raises(ValueError, match="pooling_params says both"):
        llm.embed("one", dimensions=4, pooling_params=wishes)
    print_embeddings(out.outputs.embedding, prefix="Vector")
    print_embeddings([0.5] * 9)
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"Vector: {out.outputs.embedding} (size=3)"
    assert second == "Embeddings: [0.5, 0.5, 0.5, 0.5, ...] (size=9)"


def test_all_logprobs_are_a_distribution(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=500_000)
    (out,) = llm.generate("Hello", params)
    assert out.outputs[0].logprobs
    assert out.prompt_logprobs
    for row in (*out.outputs[0].logprobs, *out.prompt_logprobs[1:]):
        assert row is not None
        assert len(row) == llm.arch.vocab_size
        assert math.fsum(math.exp(one.logprob) for one in row.values()) == pytest.approx(1)


def test_a_stop_string_can_be_shown(llm: LLM) -> None:
    whole = texts(llm.generate("Hello", SamplingParams(temperature=0, max_tokens=12)))[0]
    stop = whole[4:6]
    end = whole.index(stop)
    for shows in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=12, stop=[stop], include_stop_str_in_output=shows
        )
        expected = whole[: end + (len(stop) if shows else 0)]
        assert texts(llm.generate("Hello", params)) == [expected]
        assert "".join(chunk.text for chunk in llm.stream("Hello", params)) == expected


def test_control_tokens_can_be_shown(llm: LLM) -> None:
    spelling = llm.text.spell(0)
    for skips, expected in ((False, spelling * 2), (True, "")):
        params = SamplingParams(
            max_tokens=2, allowed_token_ids=[0], ignore_eos=True, skip_special_tokens=skips
        )
        assert texts(llm.generate("Hello", params)) == [expected]


def test_a_prompt_is_cut_only_if_that_is_asked_for(llm: LLM) -> None:
    ids = list(range(300, 330)) * 40
    room = llm.config.max_model_len
    for most, kept in ((5, 5), (2000, len(ids)), (-1, min(len(ids), room - 4))):
        if kept > room - 4:
            continue
        params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=most)
        (out,) = llm.generate([ids], params)
        assert out.prompt_token_ids == ids[-kept:]
    long = ids * 10
    (out,) = llm.generate([long], SamplingParams(max_tokens=4, truncate_prompt_tokens=-1))
    assert out.prompt_token_ids == long[-(room - 4) :]
    with pytest.raises(ValueError, match="truncate_prompt_tokens is 0"):
        llm.generate([ids], SamplingParams(truncate_prompt_tokens=0))


def test_options_of_vllm_are_taken_and_those_that_mean_nothing_are_named(
    model: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    llm = LLM(
        model=model,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        trust_remote_code=True,
        enforce_eager=True,
        quantization=None,
        tokenizer=None,
        download_dir="/somewhere",
        swap_space=4,
        dtype="float32",
        kv_cache_memory_bytes=1 << 16,
        threads=1,
    )
    said = capsys.readouterr().err
    assert said.count("nothing here depends on") == 1
    for name in ("gpu_memory_utilization", "trust_remote_code", "enforce_eager", "swap_space"):
        assert name in said
    assert "quantization" not in said
    assert llm.config.dtype == "f32"
    assert "note: KV cache" in said, "a context that was cut is told"
    llm.close()


@pytest.mark.parametrize(
    ("given", "own"),
    [
        *(("bfloat16", "bf16"), ("half", "auto"), ("float16", "auto"), ("float32", "f32")),
        *(("torch.float16", "auto"), ("float", "f32"), ("auto", "auto"), ("int8", "int8")),
    ],
)
def test_formats_have_vllms_names(given: str, own: str) -> None:
    assert taken("m", {"dtype": given}) == ("m", {"dtype": own}, [])


def test_a_revision_is_part_of_the_name() -> None:
    assert taken("owner/name", {"revision": "v1"})[0] == "owner/name@v1"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2: the cpu backend runs in one"),
        ({"tokenizer": "other/one"}, "a model has its own"),
        ({"hf_overrides": {"a": 1}}, "a model is what its files say"),
        ({"dtype": "float8"}, "--dtype is 'float8'"),
    ],
)
def test_what_would_change_an_answer_is_refused(
    model: Path,  # noqa: F811
    options: dict[str, Any],
    reason: str,
) -> None:
    with pytest.raises(ValueError, match=reason):
        LLM(model, **options)


def test_an_unknown_option_is_named_with_the_nearest() -> None:
    with pytest.raises(
        TypeError, match="no option 'max_model_length': did you mean 'max_model_len'"
    ):
        LLM("smollm2", max_model_length=5)
    with pytest.raises(TypeError, match=r"LLM has no option 'zzz'$"):
        LLM("smollm2", zzz=5)


def test_dir_shows_what_there_is_and_imports_nothing() -> None:
    code = (
        "import sys, ridgeline; assert {'LLM', 'SamplingParams'} <= set(dir(ridgeline)); "
        "assert 'numpy' not in sys.modules; "
        "assert all(getattr(ridgeline, name) for name in ridgeline.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
