"""Options as people type them, and what becomes of them on a machine with little memory."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from ridgeline.backends.cuda import device
from ridgeline.backends.interface import Setup
from ridgeline.backends.reference import footprint
from ridgeline.core.scheduling.policies import POLICIES, Orca, SplitFuse, Static
from ridgeline.engine.setup import resolve as resolving
from ridgeline.engine.setup.home import default_home
from ridgeline.engine.setup.options import (
    Options,
    SpeculativeConfig,
    parse_bytes,
    parse_speculative,
)
from ridgeline.engine.setup.resolve import EngineConfig
from ridgeline.model.cost import costs
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import ModelArch
from ridgeline.system.machine import usable_cpus
from tests.tiny import ENCODERS, LATENT, PLAIN, RECURRENT, changed, checkpoint

MIB = 1 << 20
# 48 KiB of K/V per token: cache sizes of some MiB matter, as with real models.
ARCH = changed(PLAIN, windows=(None,) * 24, head_dim=128, max_position=4096)
TOKEN_BYTES = costs.kv_bytes_per_token(ARCH, 4)
WEIGHT_BYTES = costs.weight_bytes(ARCH, 4)


def resolve(options: Options, arch: ModelArch, **limits: Any) -> EngineConfig:
    return resolving.resolve(options, stored(arch), **limits)


@cache
def stored(arch: ModelArch) -> Checkpoint:
    return checkpoint(arch)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with plenty of memory."""
    monkeypatch.setattr(resolving, "available_bytes", lambda: 1 << 40)
    return monkeypatch


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("4GiB", 4 << 30),
        ("4TiB", 4 << 40),
        ("4 gib", 4 << 30),
        ("2G", 2 * 10**9),
        ("2gb", 2 * 10**9),
        ("1.5Ki", 1536),
        ("3k", 3000),
        ("7B", 7),
    ],
)
def test_sizes(size: int | str, num_bytes: int) -> None:
    assert parse_bytes(size, "--size") == num_bytes


@pytest.mark.parametrize(
    "size", ["", "GiB", "-4", "4 GiB free", "4PiB", "0", "0.5", 0, -1, "1e9", True, "nan", "4,5GiB"]
)
def test_what_is_no_size_is_named(size: Any) -> None:
    with pytest.raises(ValueError, match=r"^--size: .* is not a size: write bytes") as caught:
        parse_bytes(size, "--size")
    assert repr(size) in str(caught.value)


@pytest.mark.parametrize("size", ["9" * 400, 10**400, "9" * 400 + "GiB", "0." + "1" * 400])
def test_a_size_that_no_machine_has_is_refused_in_a_short_line(size: Any) -> None:
    with pytest.raises(ValueError, match="is not a size: write bytes") as caught:
        parse_bytes(size, "--size")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "fastest"),
        ("dtype", "f64"),
        ("kv_cache_dtype", None),
        ("backend", "gpu"),  # not offered before it exists
        ("max_num_seqs", 0),
        ("max_num_seqs", 2.0),
        ("max_num_seqs", True),
        ("block_size", 0),
        ("block_size", "16"),
        ("max_model_len", 1),
        ("max_num_batched_tokens", 0),
        ("threads", 0),
        ("threads", -1),
        ("seed", 1.5),
        ("seed", True),
    ],
)
def test_options_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"(--)?{name.replace('_', '[-_]')}") as caught:
        Options(**{name: value})
    assert repr(value) in str(caught.value)


def test_every_option_explains_itself() -> None:
    assert all(field.metadata["help"].endswith(".") for field in fields(Options))


def test_what_is_left_open_is_chosen(memory: pytest.MonkeyPatch) -> None:
    memory.setattr(device, "has_driver", lambda: False)
    chosen = resolve(Options(), ARCH)
    assert (chosen.backend, chosen.policy) == ("cpu", SplitFuse())
    assert (chosen.dtype, chosen.kv_cache_dtype) == ("auto", "int8")
    assert (chosen.max_model_len, chosen.max_num_seqs) == (ARCH.max_position, 256)
    assert (chosen.max_num_batched_tokens, chosen.block_size) == (2048, 16)
    assert chosen.threads == usable_cpus()
    # A byte for each of 4, and something for scales and padding.
    assert TOKEN_BYTES // 4 < chosen.kv_bytes // (chosen.num_blocks * 16) < TOKEN_BYTES // 2
    assert chosen.notes == ()


def test_wishes_are_kept_where_they_fit(memory: pytest.MonkeyPatch) -> None:
    wishes = Options(
        max_model_len=1000,
        max_num_seqs=5,
        max_num_batched_tokens=77,
        block_size=8,
        kv_cache_memory="100MiB",
        policy="orca",
        backend="reference",
        enable_prefix_caching=False,
        threads=3,
        seed=9,
    )
    chosen = resolve(wishes, ARCH)
    assert (chosen.policy, chosen.enable_prefix_caching) == (Orca(), False)
    assert (chosen.max_model_len, chosen.max_num_seqs) == (1000, 5)
    assert (chosen.max_num_batched_tokens, chosen.block_size) == (77, 8)
    assert chosen.num_blocks == 100 * MIB // (8 * TOKEN_BYTES)
    assert (chosen.threads, chosen.seed, chosen.notes) == (3, 9, ())


def test_the_flag_names_all_policies_as_records_do() -> None:
    assert get_args(get_type_hints(Options)["policy"]) == tuple(POLICIES)
    assert all(policy.name == name for name, policy in POLICIES.items())


def test_blocks_are_reserved_by_the_policy_or_as_asked(memory: pytest.MonkeyPatch) -> None:
    def reserves(**options: Any) -> bool:
        return resolve(Options(**options), ARCH).policy.reserve_full

    assert [reserves(policy=name) for name in POLICIES] == [True, True, False]
    assert [reserves(policy=name, kv_reservation="paged") for name in POLICIES] == 3 * [False]
    assert [reserves(policy=name, kv_reservation="full") for name in POLICIES] == 3 * [True]


@pytest.mark.parametrize("policy", [Static(), Orca(), SplitFuse()])
def test_whole_prompts_need_a_budget_for_the_longest(
    memory: pytest.MonkeyPatch, policy: Static | Orca | SplitFuse
) -> None:
    name: Any = policy.name
    chosen = resolve(Options(policy=name), ARCH)
    assert chosen.policy == policy
    assert chosen.max_num_batched_tokens == (4096 if policy.whole_prompts else 2048)
    assert resolve(Options(policy=name, max_num_seqs=5000), ARCH).max_num_batched_tokens == 5000
    chosen = resolve(Options(policy=name, is_shared=True), ARCH)
    assert chosen.max_num_batched_tokens == (4096 if policy.whole_prompts else 256)


def test_steps_are_short_where_several_keys_share_unless_said(memory: pytest.MonkeyPatch) -> None:
    shared = resolve(Options(is_shared=True, max_num_batched_tokens=1000), ARCH)
    assert (shared.max_num_batched_tokens, shared.max_num_seqs) == (1000, 64)
    assert resolve(Options(max_num_batched_tokens=1000), ARCH).max_num_seqs == 256
    assert resolve(Options(is_shared=True, max_num_seqs=300), ARCH).max_num_batched_tokens == 300


def test_a_cache_that_cannot_be_met_is_the_largest_that_fits(memory: pytest.MonkeyPatch) -> None:
    memory.setattr(resolving, "available_bytes", lambda: WEIGHT_BYTES + 200 * MIB)
    small: dict[str, Any] = {"max_num_batched_tokens": 256, "backend": "reference"}
    chosen = resolve(Options(kv_cache_memory="1GiB", **small), ARCH)
    (note,) = chosen.notes
    assert "not 1.00 GiB" in note
    assert "--kv-cache-memory" in note
    assert "\n" not in note
    assert 50 * MIB < chosen.kv_bytes < 200 * MIB
    assert chosen.max_model_len == min(chosen.num_blocks * 16, ARCH.max_position)
    fitting = resolve(Options(kv_cache_memory=chosen.kv_bytes, max_model_len=64, **small), ARCH)
    assert fitting.num_blocks == chosen.num_blocks
    assert not fitting.notes


def test_a_cache_without_values_has_none_in_4_bits() -> None:
    latent = next(iter(LATENT.values()))
    with pytest.raises(ValueError, match="int8-int4: latent attention stores no values; use int8"):
        resolve(Options(kv_cache_dtype="int8-int4"), latent)
    assert resolve(Options(), latent).kv_cache_dtype == "int8"
    assert resolve(Options(kv_cache_dtype="int8-int4"), ARCH).kv_cache_dtype == "int8-int4"


@pytest.mark.parametrize(
    ("dtype", "decoder", "encoder"),
    [("auto", "int8", "int8"), ("int8", "int8", "int8"), ("int4", "int8", "int8"),
     ("bf16", "int8", "f16"), ("f32", "f32", "f32")],
)  # fmt: skip
def test_keys_and_values_follow_the_weights_unless_told(
    dtype: str, decoder: str, encoder: str
) -> None:
    """What is asked for in f32 is f32 altogether; an encoder keeps nothing that has to be small."""
    for model, wanted in ((ARCH, decoder), (ENCODERS["encoder"], encoder)):
        chosen = resolve(Options(dtype=dtype), model)
        assert chosen.kv_cache_dtype == wanted
        told = resolve(Options(dtype=dtype, kv_cache_dtype=wanted), model)
        assert chosen.kv_bytes == told.kv_bytes
        assert resolve(Options(dtype=dtype, kv_cache_dtype="int8"), model).kv_cache_dtype == "int8"


def test_an_encoder_runs_with_a_scale_for_each_row_unless_told() -> None:
    encoder = ENCODERS["encoder"]
    assert resolve(Options(), encoder).dtype == "int8-row"
    assert resolve(Options(dtype="int8"), encoder).dtype == "int8"
    assert resolve(Options(backend="reference"), encoder).dtype == "f32"
    assert resolve(Options(), ARCH).dtype == "auto"


def test_a_small_cache_shortens_sequences_and_says_so(memory: pytest.MonkeyPatch) -> None:
    wishes = Options(kv_cache_memory=100 * 16 * TOKEN_BYTES, backend="reference")
    chosen = resolve(wishes, ARCH)
    (note,) = chosen.notes
    assert (chosen.num_blocks, chosen.max_model_len) == (100, 1600)
    assert "1,600 tokens, not 4,096" in note
    assert "--max-model-len" in note


def test_a_limit_holds_however_much_memory_is_free(memory: pytest.MonkeyPatch) -> None:
    """What is free changes while a router looks, its limit does not."""
    options = Options(backend="reference")
    with pytest.raises(ValueError, match=r"not enough memory: 100\.0 KiB is available"):
        resolve(options, ARCH, limit_bytes=100 << 10)
    most = WEIGHT_BYTES + 200 * MIB
    limited = resolve(options, ARCH, limit_bytes=most)
    assert limited.total_bytes <= most
    memory.setattr(resolving, "available_bytes", lambda: most)
    assert resolve(options, ARCH) == resolve(options, ARCH, limit_bytes=1 << 40) == limited


def test_where_nothing_fits_the_numbers_are_named(memory: pytest.MonkeyPatch) -> None:
    memory.setattr(resolving, "available_bytes", lambda: WEIGHT_BYTES)
    weights = f"{WEIGHT_BYTES / MIB:.2f} MiB for weights"
    with pytest.raises(ValueError, match=f"not enough memory.*{weights}"):
        resolve(Options(backend="reference"), ARCH)
    memory.setattr(resolving, "available_bytes", lambda: 1 << 40)
    with pytest.raises(ValueError, match=r"--kv-cache-memory.*too little"):
        resolve(Options(kv_cache_memory="1KiB"), ARCH)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"max_model_len": 4097}, "--max-model-len 4097 .* 4096"),
        ({"backend": "reference", "dtype": "int4"}, "--dtype int4: the reference"),
        ({"backend": "reference", "kv_cache_dtype": "f16"}, "--kv-cache-dtype f16: the reference"),
        ({"block_size": 8}, "--block-size is 8: the cpu backend needs a multiple of 16"),
        ({"threads": 65536}, "--threads is 65536: at most 65535"),
        ({"kv_cache_memory": "lots"}, "'lots' is not a size"),
    ],
)
def test_what_this_model_or_version_cannot_do(
    memory: pytest.MonkeyPatch, wishes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(Options(**wishes), ARCH)
    if "max_model_len" in wishes:
        assert resolve(Options(max_model_len=4096), ARCH).max_model_len == 4096


def test_python_keeps_the_seed_0_unless_one_is_given(memory: pytest.MonkeyPatch) -> None:
    assert resolve(Options(), ARCH).seed == 0
    assert resolve(Options(seed=7), ARCH).seed == 7


def test_home_is_the_variable_or_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_HOME", "/somewhere")
    assert default_home() == Path("/somewhere")
    monkeypatch.setenv("RIDGELINE_HOME", "")
    assert default_home() == Path.home() / ".cache" / "ridgeline"


def test_a_small_token_budget_lowers_the_default_number_of_sequences(
    memory: pytest.MonkeyPatch,
) -> None:
    assert resolve(Options(max_num_batched_tokens=64), ARCH).max_num_seqs == 64


def test_more_sequences_than_tokens_a_step_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"--max-num-batched-tokens 8 is less than --max-num-seqs"):
        Options(max_num_batched_tokens=8, max_num_seqs=9)
    Options(max_num_batched_tokens=9, max_num_seqs=9)


def test_a_longer_model_needs_more_for_a_step(memory: pytest.MonkeyPatch) -> None:
    short, long = (
        footprint(ARCH, Setup("f32", "f32", 16, 1, length, 256, 2048)).step_bytes
        for length in (256, 4096)
    )
    assert long - short > 4 * 2 * ARCH.attentions[0].num_heads * (1 << 20)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, SpeculativeConfig()),
        ("off", None),
        ("{}", SpeculativeConfig()),
        (
            '{"method": "ngram", "num_speculative_tokens": 4}',
            SpeculativeConfig(num_speculative_tokens=4),
        ),
        ({"method": "suffix"}, SpeculativeConfig(method="suffix")),
        ({"method": "lookahead"}, SpeculativeConfig(method="lookahead")),
        (
            {"method": "draft_model", "model": "x.gguf"},
            SpeculativeConfig(method="draft_model", model="x.gguf"),
        ),
        (
            {"prompt_lookup_min": 3, "prompt_lookup_max": 5},
            SpeculativeConfig(prompt_lookup_min=3, prompt_lookup_max=5),
        ),
    ],
)
def test_speculative_config(value: Any, wanted: SpeculativeConfig | None) -> None:
    assert parse_speculative(value) == wanted


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("on", "neither JSON nor 'off'"),
        ("[1]", "a JSON object, or 'off'"),
        ({"method": "eagle"}, "'eagle' is not one of ngram, suffix, draft_model, lookahead"),
        ({"method": "draft_model"}, "draft_model needs a model"),
        ({"method": "draft_model", "model": 7}, "model is 7, but it must be the name or path"),
        ({"model": "x.gguf"}, "model is 'x.gguf', but it must .* and the method draft_model"),
        (
            {"method": "draft_model", "model": "x", "prompt_lookup_max": 9},
            "draft_model looks nothing up",
        ),
        ({"method": ["suffix"]}, "is not one of ngram"),
        ({"method": "lookahead", "prompt_lookup_max": 9}, "lookahead looks nothing up"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0, not a whole number from 1"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"num_speculative_tokens": 99}, "from 1 to 15"),
        ({"prompt_lookup_min": 9, "prompt_lookup_max": 4}, r"\(9\) is more than"),
        ({"disable_by_batch_size": 4}, "has no 'disable_by_batch_size'; it has method"),
        ({"always": 1}, "always is 1, not true or false"),
    ],
)
def test_a_wrong_speculative_config_names_the_way_out(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(speculative_config=value)


# --- models with recurrent layers --------------------------------------------------------------

WITH_STATES = RECURRENT["delta rule"]
STATE_BYTES = costs.state_bytes_per_seq(WITH_STATES)


def resolved(**options: Any) -> EngineConfig:
    return resolve(Options(backend="reference", **options), WITH_STATES)


def test_states_have_slots_for_sequences_and_checkpoints(memory: pytest.MonkeyPatch) -> None:
    config = resolved()
    assert (config.max_num_seqs, config.num_checkpoints) == (256, 1024)
    assert not config.notes
    without_prefixes = {"enable_prefix_caching": False}
    assert resolved(**without_prefixes, speculative_config="off").num_checkpoints == 0
    assert resolved(**without_prefixes).num_checkpoints == 256, "for drafts"
    assert resolve(Options(backend="reference"), PLAIN).num_checkpoints is None
    without = resolve(Options(backend="reference", max_num_seqs=1), WITH_STATES)
    assert (without.max_num_seqs, without.num_checkpoints) == (1, 4)


def test_states_that_take_much_leave_room_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup("f32", "f32", 16, usable_cpus(), 1024, 256, 2048)
    least = costs.weight_bytes(WITH_STATES, 4) + footprint(WITH_STATES, setup).step_bytes
    room = 100 * STATE_BYTES
    monkeypatch.setattr(resolving, "available_bytes", lambda: (least + room) * 20 // 19)
    config = resolved()
    assert (config.max_num_seqs, config.num_checkpoints) == (12, 13)
    assert config.notes[0].startswith("at most 12 sequences run at once, not 256: the state of")
    assert config.total_bytes <= least + room
    config = resolved(max_num_seqs=40)
    assert (config.max_num_seqs, config.num_checkpoints) == (40, 0)
    assert config.speculative_config is None
    assert config.notes[0].startswith(
        "no speculative decoding: memory for one more state, of 4.22 KiB"
    )
    config = resolved(max_num_seqs=40, speculative_config="off")
    assert config.notes == ()
    with pytest.raises(ValueError, match=r"there is room for \d+ sequences: lower --max-num-seqs"):
        resolved(max_num_seqs=256)


def test_a_model_with_states_has_drafts(memory: pytest.MonkeyPatch) -> None:
    assert resolved().speculative_config == SpeculativeConfig()
    assert resolved(speculative_config="off").speculative_config is None
    config = resolved(speculative_config={"method": "suffix"})
    assert config.speculative_config == SpeculativeConfig(method="suffix")


def test_a_model_without_keys_and_values_has_blocks_all_the_same(
    memory: pytest.MonkeyPatch,
) -> None:
    config = resolve(Options(backend="reference"), RECURRENT["states alone"])
    assert config.num_blocks >= config.max_model_len // config.block_size


def test_a_window_lets_longer_sequences_fit() -> None:
    """What is counted is what a sequence holds at once."""
    wishes = Options(kv_cache_memory="32MiB", max_num_seqs=4, max_num_batched_tokens=32)
    whole, narrow, mixed = (
        resolve(wishes, changed(ARCH, windows=windows, max_position=1 << 14))
        for windows in ((None,) * 24, (64,) * 24, (64,) * 23 + (None,))
    )
    assert [group.window for group in narrow.groups] == [64]
    assert [group.window for group in mixed.groups] == [None] + [64] * 23
    assert [group.window for group in whole.groups] == [None]
    assert narrow.max_model_len == 1 << 14
    assert whole.max_model_len < mixed.max_model_len == 1 << 14


@pytest.mark.parametrize(("stages", "looks_ahead"), [(1, False), (2, True)])
def test_stages_look_ahead_and_so_do_their_simulations(
    memory: pytest.MonkeyPatch, stages: int, looks_ahead: bool
) -> None:
    config = resolve(Options(backend="cpu", stages=stages, block_size=32), ARCH)
    assert config.looks_ahead is looks_ahead
    assert config.settings(()).looks_ahead is looks_ahead
