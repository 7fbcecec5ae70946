"""The commands about models: pull, list, show, rm, clean, and a table of the families that run.

docs/models.md has the same table; a test compares them. For other commands a model is loaded here,
what it had to give up is said, and its sampling is checked.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline import LLM, SamplingParams
from ridgeline.backends import BACKENDS
from ridgeline.cli.flags import UsageError
from ridgeline.cli.help import App
from ridgeline.engine.setup.build import packed_folder
from ridgeline.engine.setup.home import default_home, locate, stores
from ridgeline.engine.setup.options import Options, guard_options
from ridgeline.engine.setup.progress import say
from ridgeline.engine.setup.resolve import resolve
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.families import GGUF_FAMILIES, HF_FAMILIES, Family
from ridgeline.model.files.summary import summarise
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.hub.library import parse_hub_name
from ridgeline.model.hub.local_models import ModelStores, StoredModel
from ridgeline.model.hub.quantisations import tag_of
from ridgeline.model.hub.short_names import ALIASES, SHORT_NAMES
from ridgeline.planner.memory.placement import DEFAULT_CONTEXT
from ridgeline.planner.needs import Needs, needs_of_file
from ridgeline.system.report import Table, gb, of_pairs
from ridgeline.system.terminal import console, drawn
from ridgeline.text.checkpoint_tokenizer import tokenizer_of
from ridgeline.text.grammar.export import export_tokenizer

MODEL_HELP = (
    "A short name, a .gguf file, a directory, owner/name on the Hugging Face hub (perhaps "
    "with :Q4_K_M), or a name from Ollama."
)
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
_CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 0.95}  # where the model's files say nothing


def add_to(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command("pull")(pull)
    app.command("list")(list_models)
    app.command("models", hidden=True)(list_models)
    app.command("ls", hidden=True)(list_models)
    app.command("show")(show)
    app.command("rm")(remove)
    export = App(help="Export parts of a model for other programs.", no_args_is_help=True)
    export.command("tokenizer")(export_tokenizer_files)
    app.add_typer(export, name="export")
    app.command("clean")(clean)


def pull(model: Model, as_json: AsJson = False) -> None:
    """Download a model and verify it; an interrupted download resumes where it stopped."""
    path = locate(model, verify=True).path
    if as_json:
        print(json.dumps({"model": model, "path": str(path)}))
        return
    print(f"{model} is at {path}")
    if line := _on_disk(path):
        print(line)
    say(f"Next: ridgeline run {model}")


def _on_disk(path: Path) -> str:
    """Return what a model takes on the disk, and what its first start adds; "" if unknown."""
    try:
        checkpoint = load_checkpoint(path)
        config = resolve(Options(), checkpoint)
    except ValueError:  # the engine does not run it: `run` says why
        return ""
    packed = sum(BACKENDS[config.backend].packed_bytes(checkpoint, config).values())
    return (
        f"It needs {needs_of_file(path).in_words}. On disk it takes "
        f"{gb(checkpoint.nbytes)}, and {gb(packed)} more once its first start "
        f"has packed its weights"
    )


def list_models(
    as_json: AsJson = False,
    families: Annotated[
        bool, typer.Option("--families", help="List the supported model families instead.")
    ] = False,
) -> None:
    """List the models on this machine, and what can be pulled by a short name.

    Models in the cache of the Hugging Face hub, of Ollama and of LM Studio are used where they are.
    """
    if families:
        print(families_table())
        return
    places = stores()
    here = list(places.all())
    if as_json:
        listed = [
            {
                "name": place.name,
                "path": str(place.path),
                "size": place.size,
                "needs": None if (needs := _needed(place.path)) is None else needs.as_dict(),
                "owner": place.owner,
            }
            for place in here
        ]
        print(json.dumps({"models": listed, "problems": places.problems}))
        return
    rows = []
    for place in here:
        needs = _needed(place.path)
        needed = "-" if needs is None else gb(needs.num_bytes)
        rows.append((place.name, gb(place.size), needed, place.owner, str(place.path)))
    if here:
        table = Table(("model", "size", "needs", "from", "path"), rows, "lllll")
        console().print(drawn(table, whole=(1, 2, 3)))
        print(
            f"What each needs is memory for a text of {DEFAULT_CONTEXT:,} tokens, or its longest."
        )
    for name, entry in SHORT_NAMES.items():
        if all(place.name != name for place in here):
            needed = f"needs {gb(entry.needed_bytes)} of memory"
            print(f"not here: {name} ({gb(entry.size)}, {needed}; {entry.description})")
    for problem in places.problems:
        say(problem)
    print("Next: ridgeline run MODEL, or ridgeline show MODEL. Any .gguf file works by its path.")


def _needed(path: Path) -> Needs | None:
    """Return what a model needs in memory; None if it does not run here."""
    try:
        return needs_of_file(path)
    except (ValueError, OSError):
        return None


def show(model: Model, as_json: AsJson = False) -> None:
    """Describe a model: its architecture, formats, context, sampling, and where it is."""
    place = locate(model)
    checkpoint = load_checkpoint(place.path)
    facts = dict(_facts(checkpoint, {**place.sampling, **checkpoint.generation_defaults}))
    if as_json:
        needs = facts["needs"]
        print(json.dumps({"model": model} | facts | {"needs": needs and needs.as_dict()}))
        return
    pairs = ((name.replace("_", " "), _shown(name, value)) for name, value in facts.items())
    console().print(drawn(of_pairs(pairs)))


def _facts(checkpoint: Checkpoint, sampling: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    arch, summary = checkpoint.arch, summarise(checkpoint)
    yield "path", str(summary.path)
    yield "family", summary.family
    yield "parameters", summary.num_parameters
    yield "size", summary.num_bytes
    yield "sha256", checkpoint.contents.digest(packed_folder())
    yield "formats", dict(summary.formats)
    yield "needs", _needed(checkpoint.path)
    yield "context", arch.max_position
    yield "layers", arch.num_layers
    yield "hidden_size", arch.hidden_size
    for attention in arch.attentions[:1]:
        yield "heads", attention.num_heads
        yield "kv_heads", attention.num_kv_heads
    yield "vocabulary", arch.vocab_size
    yield "chat_template", checkpoint.can_chat
    yield "sampling", sampling


def _shown(name: str, value: Any) -> str:
    if name == "size":
        return gb(value)
    if value is None:
        return "unknown"
    if isinstance(value, Needs):
        return f"{value.in_words}: {value.parts_in_words}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {entry}" for key, entry in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def export_tokenizer_files(
    model: Model,
    folder: Annotated[Path, typer.Argument(help="Folder for the files; created if needed.")],
    as_json: AsJson = False,
) -> None:
    """Write a model's tokenizer as Hugging Face's files, for evaluation and load tests."""
    checkpoint = load_checkpoint(locate(model).path)
    tokenizer = tokenizer_of(checkpoint)
    paths = export_tokenizer(checkpoint, tokenizer, folder)
    if as_json:
        print(json.dumps({"files": [str(path) for path in paths]}))
        return
    for path in paths:
        print(path)


def remove(
    names: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Names as shown by ridgeline list.")
    ],
    as_json: AsJson = False,
) -> None:
    """Remove pulled models. Models of other programs stay."""
    places = stores()
    chosen = [_ours(ALIASES.get(name, name), places) for name in names]
    freed = sum(place.size for place in chosen)
    for place in chosen:
        for file in place.files:
            file.unlink()
        for folder in {file.parent for file in place.files}:
            _remove_if_empty(folder, places.home / "models")
    if as_json:
        print(json.dumps({"removed": [place.name for place in chosen], "freed_bytes": freed}))
    else:
        print(f"removed {', '.join(place.name for place in chosen)}: {gb(freed)} freed")


def _ours(name: str, places: ModelStores) -> StoredModel:
    """Return the only pulled model that ``name`` means. Raises ValueError if there is none."""
    meant = [place for place in places.all() if _is_meant(place, name)]
    ours = [place for place in meant if place.owner == "ridgeline"]
    hub_name = parse_hub_name(name)
    if hub_name and not hub_name.tag:  # the directory, if that is one of several
        ours = [one for one in ours if one.name.lower() == hub_name.repo.lower()] or ours
    if len(ours) == 1:
        return ours[0]
    if ours:
        raise ValueError(f"{name} means {', '.join(place.name for place in ours)}: name one")
    for place in meant:
        raise ValueError(f"{place.name} belongs to {place.owner}: remove it there ({place.path})")
    raise ValueError(f"{name!r} is not here: see ridgeline list")


def _is_meant(place: StoredModel, name: str) -> bool:
    """Whether ``name``, as run and pull take it, may mean a model."""
    if place.name in (name, f"ollama:{name}", f"ollama:{name}:latest"):
        return True
    hub_name = parse_hub_name(name)
    repo, _, tag = place.name.partition(":")
    if hub_name is None or place.owner == "ollama" or repo.lower() != hub_name.repo.lower():
        return False
    file = place.path.name
    spellings = (tag.lower(), file.lower(), tag_of(file).lower())
    return not hub_name.tag or hub_name.tag.lower() in spellings


def _remove_if_empty(folder: Path, top: Path) -> None:
    """Remove a folder and those above it, up to ``top``, if no model is left in them."""
    while folder != top and folder.is_relative_to(top):
        if any(not file.name.startswith(".") for file in folder.iterdir()):
            return
        shutil.rmtree(folder)
        folder = folder.parent


def clean(
    with_models: Annotated[
        bool, typer.Option("--models", help="Remove pulled models too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what can be made again: kernels, packed weights, unfinished downloads."""
    home = default_home()
    targets = [home / "kernels", home / "packed"]
    models = home / "models"
    targets += [models] if with_models else sorted(models.glob("**/.*"))
    freed = 0
    for target in targets:
        freed += _bytes_below(target)
        if target.is_dir():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()
    if as_json:
        print(json.dumps({"freed_bytes": freed, "home": str(home)}))
    else:
        print(f"{gb(freed)} freed in {home}")
        if not with_models and any(models.glob("*")):
            say("Models stay: ridgeline rm MODEL removes one, ridgeline clean --models all.")


def _bytes_below(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


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
    rows = [
        (f"`{name}`", kind, ", ".join(_specials(family)) or "-")
        for kind, families in (("safetensors", HF_FAMILIES), ("GGUF", GGUF_FAMILIES))
        for name, family in families.items()
    ]
    return "\n".join(Table(("architecture", "format", "features"), rows, "lll").markdown())


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
    if family.layers_are_halves:
        yield "no RoPE"
    if family.outcomes("ffn.gated") == (False,) and not family.has_experts:
        yield "an MLP without gates"
    if "latent.kv_rank" in family.facts:
        yield "latent attention"
    if True in family.outcomes("mixer.gated"):
        yield "gated attention"
    if family.recurrent:
        beside = ", parallel to attention" if family.parallel_mixer else ""
        yield f"{_RECURRENT[family.recurrent]}{beside}"
    if family.has_experts:
        by_one = "sparsemixer" in family.outcomes("ffn.router")
        yield f"a mixture of experts{', chosen one after another' if by_one else ''}"
    if family.has_some("shared.size"):
        is_optional = family.facts["shared.size"].kind == "count"
        yield "an optional shared expert" if is_optional else "a shared expert"
    if "dense.size" in family.facts:
        every_kind = family.experts_every or family.layers_are_halves
        yield "some dense layers" if every_kind else "first layers dense"
    if "beside.size" in family.facts:
        yield "a dense MLP beside the experts"


@contextmanager
def load_model(
    model: str, options: Options, sampling: dict[str, Any], *, picks_adapter: bool = True
) -> Iterator[tuple[LLM, SamplingParams]]:
    """Load a model, say what it had to give up, and check sampling parameters first of all.

    All answers have the adapter, if there is one, unless requests are to pick it.
    """
    if picks_adapter and len(options.adapters) > 1:
        raise UsageError("--lora: give only one adapter here; ridgeline serve takes several")
    try:
        SamplingParams(**sampling)
    except ValueError as error:
        raise UsageError(error) from error
    with LLM(model, **{f.name: getattr(options, f.name) for f in fields(options)}) as llm:
        if picks_adapter:
            llm.adapters.default = next(iter(options.adapters), None)
        llm.tokenizer.prepare()  # before a prompt is asked for, and before Ctrl-C means an answer
        yield llm, SamplingParams(**(_CHAT_DEFAULTS | llm.text.generation_defaults | sampling))


def seeded(options: Options) -> Options:
    """Return ``options`` with a fresh seed unless they have one, short enough to type again."""
    return options if options.seed is not None else replace(options, seed=secrets.randbelow(10**6))


@contextmanager
def loaded(model: str, options: Options) -> Iterator[LLM]:
    """Load a model whose requests have their own sampling, and may pick an adapter."""
    with load_model(model, options, {}, picks_adapter=False) as (llm, _):
        yield llm


def load_guard(name: str, options: Options) -> AbstractContextManager[LLM]:
    """Load a model that judges beside one with these options."""
    return loaded(name, guard_options(options))
