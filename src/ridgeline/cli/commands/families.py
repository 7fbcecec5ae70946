"""The families of models that run, as the tables say: ``ridgeline models --families``.

docs/models.md has the same text; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.models.families import GGUF_FAMILIES, HF_FAMILIES, Family

_NORMS = {
    "behind": "norms behind",
    "around": "norms around",
    "beside": "attention beside the MLP",
    "beside, own": "attention beside the MLP",
    "within": "norms that replace what they norm",
}
_WINDOWS = {
    "all": "a sliding window",
    "switch": "a sliding window, if switched on",
    "switch of all": "a sliding window, if switched on",
    "pattern": "windows in turn",
}
_RECURRENT = {
    "conv": "short convolutions, which keep a state",
    "delta": "the gated delta rule, which keeps a state",
    "ssm": "state spaces, which keep a state",
}


def families_table() -> str:
    """Return a markdown table of every family and what is special about it."""
    rows = ["| in files | as | what is special |", "|---|---|---|"]
    for kind, families in (("safetensors", HF_FAMILIES), ("GGUF", GGUF_FAMILIES)):
        rows += [
            f"| `{name}` | {kind} | {', '.join(_specials(family)) or 'nothing'} |"
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
        behind = " behind rope" if True in family.outcomes("mixer.norm_turned") else ""
        yield f"queries and keys{' of some' if '' in normed else ''} normed over the {over}{behind}"
    if family.windows in _WINDOWS:
        yield _WINDOWS[family.windows]
    if family.heads_by_layer:
        yield "heads by layer"
    if "layer.input_size" in family.facts:
        yield "an input per layer"
    if "mixer.bias_buckets" in family.facts:
        yield "scores with learnt biases by distance"
    if "mixer.slopes" in family.facts:
        yield "scores that lose by distance (ALiBi)"
    elif family.ropes or family.heads_by_layer:
        yield "learnt positions" if "positions" in family.outer else "rope by layer"
    if "rope.turns" in family.facts:
        turns = True in family.outcomes("rope.turns")
        yield "rope, if switched on" if turns else "no rope"
    if "mixer.sinks" in family.facts:
        yield "attention sinks"
    if "mixer.softcap" in family.facts:
        yield "soft-capped scores and logits"
    if "residual_scale" in family.facts:
        yield "scaled embedding, residuals and logits"
    if family.by_halves:
        yield "no rope"
    if family.outcomes("ffn.gated") == (False,) and not family.has_experts:
        yield "an MLP without gates"
    if "latent.kv_rank" in family.facts:
        yield "latent attention"
    if True in family.outcomes("mixer.gated"):
        yield "gated attention"
    if family.recurrent:
        yield f"{_RECURRENT[family.recurrent]}{', beside attention' if family.beside else ''}"
    if family.has_experts:
        by_one = "sparsemixer" in family.outcomes("ffn.router")
        yield f"a mixture of experts{', taken one by one' if by_one else ''}"
    if family.has_some("shared.size"):
        one = "an expert that all tokens meet"
        yield f"{one}, if any" if family.facts["shared.size"].how == "count" else one
    if "dense.size" in family.facts:
        every_kind = family.experts_every or family.by_halves
        yield f"{'also' if every_kind else 'first'} layers without experts"
    if "beside.size" in family.facts:
        yield "a dense network beside them"
