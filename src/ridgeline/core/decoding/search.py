"""Which search a request's parameters ask for, and what they must not ask for besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ridgeline.core.decoding.beams import Beams
from ridgeline.core.decoding.contrastive import Contrastive
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Request

# What a search takes. Whatever else is set, it refuses.
_BOTH = (
    *("n", "seed", "stop_token_ids", "max_tokens", "min_tokens", "ignore_eos", "logprobs"),
    *("prediction", "skip_special_tokens", "truncate_prompt_tokens"),
)
_OF_BEAMS = ("length_penalty", "early_stopping")
_WITH = {
    "use_beam_search": (
        *(*_BOTH, *_OF_BEAMS),
        *("best_of", "structured_outputs", "use_beam_search"),
    ),
    "penalty_alpha": (*_BOTH, "stop", "include_stop_str_in_output", "top_k", "penalty_alpha"),
}
_SAME_AS_DEFAULT = {"temperature": 0, "top_k": -1, "logit_bias": {}}  # to a search


def with_recommended(recommended: Mapping[str, Any], **changes: Any) -> SamplingParams:
    """Return the sampling that a model recommends, with ``changes``. Raises ValueError.

    A search draws nothing, so recommendations do not apply to it.
    """
    searches = changes.get("use_beam_search") or changes.get("penalty_alpha") is not None
    return SamplingParams(**{**({} if searches else recommended), **changes})


def check_search(params: SamplingParams, *, is_stream: bool = False) -> None:
    """Raise ValueError, which begins with a field's name, for what contradicts a search.

    Searches draw nothing, so all that changes a distribution is refused; temperatures 0 and 1 are
    the same to them. Answers that are chosen when they are complete cannot be streamed.
    """
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise ValueError("early_stopping must be true, false or 'never'")
    search = "use_beam_search" if params.use_beam_search else "penalty_alpha"
    for field in fields(params):
        name, value = field.name, getattr(params, field.name)
        if value in (field.default, _SAME_AS_DEFAULT.get(name, field.default)):
            continue
        if params.searches and name not in _WITH[search]:
            raise ValueError(f"{name} is {value!r:.80}: {search} excludes it")
        if not params.use_beam_search and name in _OF_BEAMS:
            raise ValueError(f"{name} is {value!r}: it needs use_beam_search")
    if params.penalty_alpha:
        _check_contrastive(params)
    elif params.penalty_alpha == 0 and params.temperature:
        raise ValueError(f"temperature is {params.temperature}: penalty_alpha 0 means greedy")
    elif is_stream and (params.use_beam_search or params.num_answers > params.n):
        name = "use_beam_search" if params.use_beam_search else "best_of"
        raise ValueError(f"stream is not possible: {name} chooses among complete answers")


def _check_contrastive(params: SamplingParams) -> None:
    if params.top_k < 2:
        raise ValueError(
            f"penalty_alpha is {params.penalty_alpha}: it needs top_k, at least 2, which says "
            f"how many candidates of each token are compared"
        )
    if params.n > 1:
        raise ValueError(f"n is {params.n}: penalty_alpha has one answer")


def new_search(request: Request) -> Beams | Contrastive | None:
    """Return the search that a request's parameters ask for, None if it draws its tokens.

    Raises ValueError if they contradict it.
    """
    params = request.params
    check_search(params)
    num_ranked = params.logprobs or 0
    if params.penalty_alpha:
        return Contrastive(
            params.penalty_alpha,
            params.top_k,
            request.stop_ids,
            min_tokens=params.min_tokens,
            num_ranked=num_ranked,
        )
    if not params.use_beam_search:
        return None
    return Beams(
        params.num_seqs,
        request.max_len - len(request.prompt),
        request.stop_ids,
        num_answers=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        min_tokens=params.min_tokens,
        num_ranked=num_ranked,
    )
