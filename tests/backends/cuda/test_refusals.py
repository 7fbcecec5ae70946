"""What the backend cannot compute yet is refused by name, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.backends import cuda
from ridgeline.backends.cuda import device
from ridgeline.backends.cuda.layer_spec import HeadSpec, head_spec, missing
from ridgeline.model.shape.model import Experts, ModelArch
from tests.tiny import ARCHS, ENCODERS, LATENT, PLAIN, RECURRENT, changed, new_setup

EXPERTS = Experts(4, 2, 64)


@pytest.mark.parametrize("arch", ENCODERS.values(), ids=list(ENCODERS))
def test_encoders(arch: ModelArch) -> None:
    line = (
        r"^--backend cuda has no models that read texts whole \(encoders\) yet: use --backend cpu$"
    )
    with pytest.raises(ValueError, match=line):
        cuda.settle(new_setup(), arch)


@pytest.mark.parametrize("arch", LATENT.values(), ids=list(LATENT))
def test_latents_are_computed_up_to_a_width(arch: ModelArch) -> None:
    assert missing(arch) is None
    layers = [
        layer
        if layer.attention is None or layer.attention.latent is None
        else replace(
            layer,
            mixer=replace(layer.attention, latent=replace(layer.attention.latent, kv_rank=1024)),
        )
        for layer in arch.layers
    ]
    assert "latents of 1024 channels" in str(missing(replace(arch, layers=tuple(layers))))


@pytest.mark.parametrize(("heads", "shared"), [(8, 8), (64, 64), (65, 13), (128, 64), (71, 1)])
def test_query_heads_of_a_key_head_are_shared_out_equally(heads: int, shared: int) -> None:
    assert HeadSpec(heads, 1, 64, 32, 1.0).shared == shared
    assert HeadSpec(128, 1, 576, 32, 1.0, value_at=64).shared == 16
    assert HeadSpec(32, 1, 512, 32, 1.0).shared == 16  # so wide that programs have few rows


@pytest.mark.parametrize("arch", RECURRENT.values(), ids=list(RECURRENT))
def test_recurrent_layers_are_computed(arch: ModelArch) -> None:
    assert missing(arch) is None


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"head_dim": 1024}, "heads of 1024 channels"),
        ({"norm_turned": True, "qk_norm": "width"}, "normed behind rope"),
    ],
)
def test_parts_of_layers(facts: dict[str, object], what: str) -> None:
    assert what in str(missing(changed(PLAIN, **facts)))


def test_plain_layers_and_experts_are_computed() -> None:
    assert missing(PLAIN) is None
    assert missing(replace(PLAIN, layers=(replace(PLAIN.layers[0], ffn=EXPERTS),))) is None
    assert sum(missing(arch) is None for arch in ARCHS.values()) >= len(ARCHS) - 4


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"dtype": "int8-row"}, "--dtype int8-row"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8"),
        ({"dtype": "f32", "kv_cache_dtype": "bf16"}, "--kv-cache-dtype bf16"),
        ({"block_size": 8}, "--block-size is 8"),
    ],
)
def test_settings_are_refused_by_their_flags(
    changes: dict[str, object], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "check", lambda: None)  # a machine that has a GPU
    with pytest.raises(ValueError, match=flag):
        cuda.check(new_setup(**{"dtype": "auto", "kv_cache_dtype": "auto"} | changes), PLAIN)


def test_what_is_open_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "check", lambda: None)
    for dtype, wanted in (
        ("auto", ("bf16", "bf16")),
        ("f32", ("f32", "f32")),
        ("int4", ("int4", "bf16")),
    ):
        setup = cuda.check(new_setup(dtype=dtype, kv_cache_dtype="auto"), PLAIN)
        assert (setup.dtype, setup.kv_cache_dtype) == wanted


def test_a_spec_says_when_heads_are_normed() -> None:
    mixer = PLAIN.layers[0].known_attention
    assert head_spec(mixer, 1e-5).qk_norm == 0
    assert head_spec(replace(mixer, qk_norm="head"), 1e-5).qk_norm == 1
    assert head_spec(replace(mixer, qk_norm="head", norm_turned=True), 1e-5).qk_norm == 2
    assert head_spec(replace(mixer, qk_norm="width"), 1e-5).qk_norm == 0
