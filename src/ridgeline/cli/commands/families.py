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


def _standing(family: Family) -> str:
    """Return where norms stand in models of a family, or in some of them."""
    reader = family.facts.get("layer.norms")
    if reader is None:
        return ""
    match reader.how:
        case "bias":
            return str(reader.argument[1])
        case "numbered":
            return str(next(iter(reader.argument[0].values())))
    return str(reader.argument)


def _specials(family: Family) -> Iterator[str]:
    constants = {name: reader.argument for name, reader in family.facts.items()}
    if constants.get("mixer.causal") is False:
        yield "an encoder"
    if norms := _NORMS.get(_standing(family)):
        yield norms
    if constants.get("norm") == "layer":
        yield f"LayerNorm{' without weights' if family.plain_norms else ''}"
    if qk_norm := constants.get("mixer.qk_norm"):
        behind = " behind rope" if constants.get("mixer.norm_turned") else ""
        over = "width" if "width" in str(qk_norm) else "head"
        some = "" if qk_norm == over else " of some"
        yield f"queries and keys{some} normed over the {over}{behind}"
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
        yield "no rope" if constants["rope.turns"] is False else "rope, if switched on"
    if "mixer.sinks" in family.facts:
        yield "attention sinks"
    if "mixer.softcap" in family.facts:
        yield "soft-capped scores and logits"
    if "residual_scale" in family.facts:
        yield "scaled embedding, residuals and logits"
    if family.by_halves:
        yield "no rope"
    if constants.get("ffn.gated") is False and not family.has_experts:
        yield "an MLP without gates"
    if "latent.kv_rank" in family.facts:
        yield "latent attention"
    if constants.get("mixer.gated"):
        yield "gated attention"
    if family.recurrent:
        yield f"{_RECURRENT[family.recurrent]}{', beside attention' if family.beside else ''}"
    if family.has_experts:
        by_one = constants.get("ffn.router") == "sparsemixer"
        yield f"a mixture of experts{', taken one by one' if by_one else ''}"
    if "shared.size" in family.facts:
        one = "an expert that all tokens meet"
        yield f"{one}, if any" if family.facts["shared.size"].how == "count" else one
    if "dense.size" in family.facts:
        every_kind = family.experts_every or family.by_halves
        yield f"{'also' if every_kind else 'first'} layers without experts"
    if "beside.size" in family.facts:
        yield "a dense network beside them"
