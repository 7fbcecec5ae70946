"""What a start says of answers that may be others than the publisher's."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import resolve, start_lines
from tests.engine.setup.test_conversion import with_blocks
from tests.tiny import ARCHS, checkpoint


def lines(name: str, **options: object) -> list[str]:
    model = checkpoint(ARCHS[name])
    return start_lines("m", model, resolve(Options(kv_cache_memory="1MiB", **options), model))


def test_factors_of_long_texts_are_named_with_the_way_out() -> None:
    (line,) = lines("long rope")
    assert line.startswith("LongRoPE: sequences may have 1,024 tokens, so positions of all texts")
    assert "texts of up to 32 tokens, and --max-model-len 32 takes those" in line
    assert lines("long rope", max_model_len=33) == [line.replace("have 1,024", "have 33")]


def test_nothing_is_said_where_short_texts_have_their_own_factors() -> None:
    assert lines("long rope", max_model_len=32) == []
    assert lines("scaled rope") == lines("plain") == []


def test_an_end_of_the_context_before_the_model_s_is_said() -> None:
    model = checkpoint(replace(ARCHS["plain"], chunk=512, max_position=511))
    config = resolve(Options(kv_cache_memory="1MiB"), model)
    (line,) = start_lines("m", model, config)
    assert line.startswith("sequences end at 511 tokens: beyond them layers of this model see")
    assert "chunks of 512 tokens, which is not computed" in line


def test_a_model_without_any_end_says_so() -> None:
    model = replace(checkpoint(ARCHS["plain"]), eos_ids=())
    config = resolve(Options(kv_cache_memory="1MiB"), model)
    (line,) = start_lines("m", model, config)
    assert line.startswith("m names no token that ends an answer: answers run to their limit")
    assert "eos_token in tokenizer_config.json" in line
    makes_vectors = replace(model, arch=replace(model.arch, has_head=False, tied_embeddings=True))
    assert start_lines("m", makes_vectors, config) == []


def test_what_a_file_says_that_is_not_gone_by_is_said() -> None:
    model = replace(checkpoint(ARCHS["plain"]), notes=("one", "two"))
    config = resolve(Options(kv_cache_memory="1MiB"), model)
    assert start_lines("m", model, config) == ["m: one", "m: two"]


def test_four_bits_of_a_wider_file_are_named_with_the_way_out() -> None:
    (line,) = lines("plain", dtype="int4")
    assert line.startswith("--dtype int4: what the file has as F32 becomes 4 bits, which raised")
    assert "those run without --dtype; `ridgeline bench quality m` measures it" in line
    assert lines("plain", dtype="int8") == []
    blocks = with_blocks("Q4_K")
    config = resolve(Options(dtype="int4", kv_cache_memory="1MiB"), blocks)
    assert start_lines("m", blocks, config) == []
