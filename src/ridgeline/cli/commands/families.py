"""The families of models that run, as the tables say: ``ridgeline models --families``.

docs/models.md has the same text; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.model.files.families import GGUF_FAMILIES, HF_FAMILIES, Family

_NORMS = {
    "behind": "post-norm",
    "around": "norms before and after attention and MLP",
    "beside": "parallel attention and MLP",
    "beside, own": "parallel attention and MLP",
    "within": "post-norm residuals",
}
_WINDOWS = {
    "all": "a sliding window",
    "switch": "an optional sliding window",
    "switch of all": "an optional sliding window",
    "pattern": "sliding windows in some layers",
}
_RECURRENT = {
    "conv": "short convolutions (recurrent)",
    "delta": "gated delta rule (recurrent)",
    "ssm": "state space layers (recurrent)",
}


def families_table() -> str:
    """Return a markdown table of every family and what is special about it."""
    rows = ["| architecture | format | features |", "|---|---|---|"]
    for kind, families in (("safetensors", HF_FAMILIES), ("GGUF", GGUF_FAMILIES)):
        rows += [
            f"| `{name}` | {kind} | {', '.join(_specials(family)) or '-'} |"
            for name, family in families.items()
        ]
    return "\n".join(rows)


def _specials(family: Family) -> Iterator[str]:
    if family.outcomes("mixer.causal") == (False,):
        yield "an encoder"
    standing = [_NORMS[place] for place in family.outcomes("layer.norms") if place in _NORMS]
    yield from standing[:1]
    if "layer" in family.outcomes("norm"):
        yield f"LayerNorm{' without weights' if family.plain_norms else ''}"
    normed = family.outcomes("mixer.qk_norm")
    for over in filter(None, normed):
        behind = " after RoPE" if True in family.outcomes("mixer.norm_turned") else ""
        yield f"QK norm over the {over}{behind}{' in some layers' if '' in normed else ''}"
    if family.windows in _WINDOWS:
        yield _WINDOWS[family.windows]
    if family.heads_by_layer:
        yield "head sizes by layer"
    if "layer.input_size" in family.facts:
        yield "per-layer embeddings"
    if "mixer.bias_buckets" in family.facts:
        yield "relative position biases"
    if "mixer.slopes" in family.facts:
        yield "ALiBi"
    elif family.ropes or family.heads_by_layer:
        yield "learnt position embeddings" if "positions" in family.outer else "RoPE by layer"
    if "rope.turns" in family.facts:
        turns = True in family.outcomes("rope.turns")
        yield "optional RoPE" if turns else "no RoPE"
    if "mixer.sinks" in family.facts:
        yield "attention sinks"
    if "mixer.softcap" in family.facts:
        yield "soft-capped scores and logits"
    if "residual_scale" in family.facts:
        yield "scaled embedding, residuals and logits"
    if family.by_halves:
        yield "no RoPE"
    if family.outcomes("ffn.gated") == (False,) and not family.has_experts:
        yield "an MLP without gates"
    if "latent.kv_rank" in family.facts:
        yield "latent attention"
    if True in family.outcomes("mixer.gated"):
        yield "gated attention"
    if family.recurrent:
        yield f"{_RECURRENT[family.recurrent]}{', parallel to attention' if family.beside else ''}"
    if family.has_experts:
        by_one = "sparsemixer" in family.outcomes("ffn.router")
        yield f"a mixture of experts{', chosen one after another' if by_one else ''}"
    if family.has_some("shared.size"):
        is_optional = family.facts["shared.size"].how == "count"
        yield "an optional shared expert" if is_optional else "a shared expert"
    if "dense.size" in family.facts:
        every_kind = family.experts_every or family.by_halves
        yield "some dense layers" if every_kind else "first layers dense"
    if "beside.size" in family.facts:
        yield "a dense MLP beside the experts"
