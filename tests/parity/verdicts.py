"""One flipped config, judged: our answer against that of transformers, or our refusal.

The model answers prompts of 220 and 31 tokens together, in pieces of 48, and 16 tokens more, or
makes vectors of them; transformers reads each whole text in one pass.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ridgeline import LLM, SamplingParams
from ridgeline.model.files.families import arch_from_config, family_of
from ridgeline.model.files.tensors import ModelFileError
from tests.parity import pooling, tiny
from tests.parity.flips import Flip, flips
from tests.parity.tiny import torch, transformers
from tests.parity.tiny_encoders import ENCODERS

LENGTHS = (220, 31)
PIECE, NUM_TOKENS = 48, 16
_NUM_RANKED = 32  # logprobs of each row: a change of any logit moves them all
TOLERANCE = 1e-4
_MOVES, _MOVED = 4, 5e-7  # of embeddings, to see whether rounding decides
_FAR, _MEAN = 5e-3, 3e-5  # of what float32 alone does to a few logprobs of a sharp model
_ROUNDED = 5  # times what float32 does to the answer of transformers itself
_CONTEXT, ROOM = 320, 284  # tokens; room is for the texts
_MAX_PARAMETERS = 20_000_000
_SPACE = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
Verdict = Literal["equal", "refused", "impossible", "ours", "unnamed", "wrong"]
# Keys that transformers passes over: one that the publisher's own code and llama.cpp go by, and
# one that it looks for beside the ropes of each kind of layer, not within.
_OURS = r"Mpt attn_config\.alibi_bias_max|\w+ rope_parameters\.\w+\.truncate"


gc.freeze()


@dataclass(frozen=True)
class Judged:
    """What became of a flip.

    Attributes:
        name: of the tiny model.
        flip: as text.
        verdict: "equal"; "refused" with the key's name; "impossible" for transformers; "unnamed",
            refused without the key's name; "wrong"; or "ours", where transformers passes over a key
            that the publisher's code goes by.
        why: differences, or the message.
    """

    name: str
    flip: str
    verdict: Verdict
    why: str


class Said(NamedTuple):
    """Our answer: all ids of a text, and behind each but the last the likeliest tokens."""

    ids: list[int]
    rows: list[dict[int, float]]

    def picked(self, table: Any = None) -> np.ndarray:
        """Return the logprobs of all those tokens in one row, ours or those of ``table``."""
        table = self.rows if table is None else table
        pairs = zip(table, self.rows, strict=True)
        return np.array([of[token] for of, row in pairs for token in row])

    def off(self, model: Any) -> np.ndarray:
        """Return how far each of those is from that of transformers."""
        distance: np.ndarray = abs(self.picked() - self.picked(logprobs_of(model, self.ids[:-1])))
        return distance


Answer = Said | pooling.Pooled


def config_of(name: str) -> Any:
    """Return the config of a tiny model with room for the longer text."""
    return tiny.make_config(name, **roomy(name))


def roomy(name: str) -> dict[str, Any]:
    said = tiny.make_config(name)
    known = {one.name for one in fields(said)}
    known |= tiny.ALL[name][1].keys()
    return {key: _CONTEXT for key in _SPACE if key in known}


def flips_of(name: str) -> Iterator[Flip]:
    """Yield all flips of a tiny model, first that of nothing."""
    yield Flip("", None, {})
    of_all = frozenset(one.name for one in fields(transformers.PreTrainedConfig))
    yield from flips(config_of(name), of_all)


def judge(
    name: str, flip: Flip, backend: str = "reference", says: Mapping[str, Any] | None = None
) -> Judged:
    """Make the model, let both answer, and compare.

    ``says`` is what config.json says instead of what the model has, to try the judge.
    """
    folder = Path(tempfile.mkdtemp(prefix="parity-"))
    try:
        verdict, why = _judge(name, flip, backend, folder, says or {})
    finally:
        shutil.rmtree(folder)
        gc.collect()  # of our engine and its cache; what was imported is frozen
    text = f"{flip.key} = {flip.value!r}" if flip.key else "as it is"
    return Judged(name, text, verdict, why)


def _judge(
    name: str, flip: Flip, backend: str, folder: Path, says: Mapping[str, Any]
) -> tuple[Verdict, str]:
    try:
        config = tiny.make_config(name, **(roomy(name) | flip.changes))
        if not says and (refusal := _refused_at_once(name, flip, config)):
            return "refused", refusal
        model = tiny.make_model(name, **(roomy(name) | flip.changes))
        if sum(one.numel() for one in model.parameters()) > _MAX_PARAMETERS:
            return "impossible", "too large"
        _undo_floors(model)
        texts = tiny.prompts(*LENGTHS)
        (pooling if name in ENCODERS else tiny).save(model, folder)
        if not np.isfinite(_theirs(name, model, folder, texts[0])).all():
            return "impossible", "transformers answers with no numbers"
        values = _without(json.loads((folder / "config.json").read_text()), flip)
        (folder / "config.json").write_text(json.dumps(values | {**says}))
    except Exception as error:  # what transformers does with a value is its own affair
        return "impossible", f"{type(error).__name__}: {error}"
    try:
        answers = [
            one
            for texts, room in _batches(model, texts)
            for one in _ours(name, model, folder, texts, room, backend)
        ]
    except (ModelFileError, ValueError) as error:
        return _refused(flip, folder, str(error))
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    verdict, why = _compared(model, answers)
    key = f"{tiny.ALL[name][0]} {flip.key}"
    is_ours = verdict == "wrong" and re.fullmatch(_OURS, key)
    return ("ours" if is_ours else verdict), why


def _without(values: dict[str, Any], flip: Flip) -> dict[str, Any]:
    """Return what config.json says if the flip's absent keys are not said."""
    for *outer, key in flip.absent:
        inner = values
        for name in outer:
            inner = inner.get(name, {})
        inner.pop(key, None)
    return values


def _undo_floors(model: Any) -> None:
    """Limit Nemotron-H's steps as the publisher's code does: see ``test_families``."""
    for module in model.modules():
        if type(module).__name__.startswith("NemotronH") and hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(model.config.time_step_limit)


def _batches(model: Any, texts: list[list[int]]) -> list[tuple[list[list[int]], int]]:
    """Return texts that are answered together, and the room for each.

    With LongRoPE transformers goes by the length of each text, the engine by the room for one.
    """
    if "'longrope'" in str(getattr(model.config, "rope_parameters", None)):
        return [([ids], len(ids)) for ids in texts]
    return [(texts, ROOM)]


def _theirs(name: str, model: Any, folder: Path, ids: list[int]) -> np.ndarray:
    if name not in ENCODERS:
        return logprobs_of(model, ids)
    if not pooling.scores_pairs(model):
        return pooling.numbers_of(model, ids)
    (pair,) = pooling.pairs_of([ids])
    return pooling.numbers_of(model, *pooling.pair_ids(folder, pair))


def _ours(
    name: str, model: Any, folder: Path, texts: list[list[int]], room: int, backend: str
) -> Sequence[Answer]:
    if name in ENCODERS:
        return pooling.answers_of(folder, model, texts, room, backend)
    return answers_of(folder, texts, room, backend)


def answers_of(folder: Path, texts: list[list[int]], room: int, backend: str) -> list[Said]:
    """Return our answers to these texts, given together, each of which has this room."""
    llm = LLM(
        str(folder),
        backend=backend,
        dtype="f32",
        kv_cache_dtype="f32",
        max_num_batched_tokens=PIECE,
        max_num_seqs=4,
        kv_cache_memory="16MiB",
        max_model_len=room + NUM_TOKENS,
        threads=1,
    )
    params = SamplingParams(
        temperature=0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=_NUM_RANKED,
        prompt_logprobs=_NUM_RANKED,
    )
    answers = []
    for ids, out in zip(texts, llm.generate(texts, params), strict=True):
        ours = out.outputs[0]
        rows = out.prompt_logprobs[1:] + ours.logprobs
        said = [{token: one.logprob for token, one in row.items()} for row in rows]
        answers.append(Said(ids + list(ours.token_ids), said))
    return answers


def _compared(model: Any, answers: list[Answer]) -> tuple[Verdict, str]:
    """Compare with transformers; where rounding decides between experts, with the other choice."""
    verdict, why = _beside(model, answers)
    if verdict != "wrong":
        return verdict, why
    if "Experts" not in str(model):
        is_rounding = all(_is_rounding(model, one) for one in answers)
        return ("equal" if is_rounding else "wrong"), why
    for seed in range(_MOVES):
        if _beside(_moved(model, seed), answers)[0] == "equal":
            return "equal", f"{why}; equal if embeddings move by {_MOVED:g}: a tie of experts"
    return verdict, why


def _is_rounding(model: Any, answer: Answer) -> bool:
    """Return whether we are as near to transformers in float64 as transformers is in float32."""
    if not isinstance(answer, Said):
        return False
    ids, exact = answer.ids[:-1], deepcopy(model).double()
    theirs = abs(answer.picked(logprobs_of(model, ids)) - answer.picked(logprobs_of(exact, ids)))
    ours = answer.off(exact)
    return bool(ours.max() <= _ROUNDED * theirs.max() and ours.mean() <= _ROUNDED * theirs.mean())


def _beside(model: Any, answers: list[Answer]) -> tuple[Verdict, str]:
    off = [one.off(model) for one in answers]
    far, mean = float(np.concatenate(off).max()), float(np.concatenate(off).mean())
    is_equal = far <= TOLERANCE or (far <= _FAR and mean <= _MEAN)
    return "equal" if is_equal else "wrong", f"{far:.1e} (mean {mean:.1e})"


def _moved(model: Any, seed: int) -> Any:
    """Return the model with each number of its embedding moved by a few units in the last place."""
    moved, chance = deepcopy(model), torch.Generator().manual_seed(seed)
    weight = moved.get_input_embeddings().weight
    with torch.no_grad():
        weight.mul_(1 + _MOVED * (2 * torch.rand(weight.shape, generator=chance) - 1))
    return moved


def logprobs_of(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.log_softmax(-1).numpy()


def _refused_at_once(name: str, flip: Flip, config: Any) -> str:
    """Return the message if the config alone is refused by the key's name: no model is needed."""
    values = _without(json.loads(config.to_json_string()), flip)
    values |= {"architectures": [tiny.class_name(name)]}
    try:
        arch_from_config(values, {}, "config.json")
    except ModelFileError as error:
        message = str(error)
        return message if _is_named(flip, values, message) else ""
    return ""


def _refused(flip: Flip, folder: Path, message: str) -> tuple[Verdict, str]:
    message = message.replace(str(folder), "").strip(": ")
    if message.endswith("use --backend reference"):  # a backend without this kind of layer
        return "refused", message
    values = json.loads((folder / "config.json").read_text())
    return ("refused" if _is_named(flip, values, message) else "unnamed"), message


def _is_named(flip: Flip, values: dict[str, Any], message: str) -> bool:
    """Return whether a refusal names the key as the file has it, or a kind of rope."""
    family = family_of(values)
    names = set()
    for key in (*flip.key.split(", "), *flip.changes) if flip.key else ():
        last = key.rpartition(".")[2]
        names |= {last, getattr(family, "aliases", {}).get(last, last)}
        if last == "rope_type":
            names.add(repr(flip.value))
        if kind := re.match(r"(\w+): ", str(flip.value)):  # of a rope, in which the key has a value
            names.add(f"rope_type {kind[1]!r}")
    return any(re.search(rf"(?<![a-z]){re.escape(name)}(?![a-z])", message) for name in names)
