"""The stage of this machine: the engine as it serves, with a model that computes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from random import Random
from typing import Any

from ridgeline.bench.claims.harness import (
    ClaimRequest,
    EngineVariant,
    LoadSizes,
    RunCounts,
    counted,
)
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record
from ridgeline.core.scheduling.policies import Load
from ridgeline.engine.llm import LLM

_DRAFTS = {
    "off": "off",
    "ngram": '{"method":"ngram","num_speculative_tokens":4}',
    "lookahead": '{"method":"lookahead"}',
}
_REPEATING = "Count: one two three four five six seven eight nine ten eleven twelve " * 6
_MOST_LEN = 1024  # of a sequence
_MOST_LOADED = 2  # the two sides of a technique


class RealStage:
    """A model that is loaded here, once for each way to set up its engine.

    Attributes:
        name: of the machine.
        model: the model's name.
        rounds: how often both sides run, in turn.
    """

    is_real = True
    rounds = 2
    name = "this machine"
    usd_per_hour = None

    def __init__(self, model: str, options: dict[str, Any], sizes: LoadSizes) -> None:
        """Load the model; ``options`` hold for all ways. Raises ValueError if it cannot be."""
        self._model, self._options, self.sizes = model, dict(options), sizes
        self._loaded: dict[EngineVariant, LLM] = {}
        first = self._llm(EngineVariant())
        self.model = first.path.stem
        self._options["max_model_len"] = min(_MOST_LEN, first.config.max_model_len)
        self._vocab = range(10, first.arch.vocab_size)
        self.num_heads = sum(mixer.num_heads for mixer in first.arch.attentions)

    def _llm(self, variant: EngineVariant) -> LLM:
        """Return the model with an engine that is set up so; of others the oldest is given up."""
        if variant not in self._loaded:
            while len(self._loaded) >= _MOST_LOADED:
                self._loaded.pop(next(iter(self._loaded))).close()
            chosen = {"dtype": variant.dtype, "kv_cache_dtype": variant.kv_cache_dtype}
            if variant.cache_tokens:
                chosen["kv_cache_memory"] = str(variant.cache_tokens * self._token_bytes)
            self._loaded[variant] = LLM(
                self._model,
                policy=variant.policy,
                max_num_seqs=variant.max_num_seqs,
                kv_reservation=variant.kv_reservation,
                enable_prefix_caching=variant.enable_prefix_caching,
                speculative_config=_DRAFTS[variant.drafts],
                **self._options | {name: value for name, value in chosen.items() if value},
            )
        return self._loaded[variant]

    @cached_property
    def _token_bytes(self) -> int:
        """Bytes of a token in the cache, in the format that is usual here."""
        config = self._llm(EngineVariant()).config
        return -(-config.kv_bytes // (config.num_blocks * config.block_size))

    @cached_property
    def read_bytes_per_s(self) -> float:
        """Of the memory, as far as one stream reads weights: at least."""
        num_prompt, num_new = self.sizes.one
        load = [ClaimRequest(self.prompt(num_prompt, "one"), num_new, num_new)]
        return (
            self._llm(EngineVariant()).config.weights_bytes / self.run(load, EngineVariant()).tail_s
        )

    def prompt(self, num_tokens: int, seed: str) -> tuple[int, ...]:
        """Return random token ids."""
        return tuple(Random(seed).choices(self._vocab, k=num_tokens))

    def repeating_prompt(self) -> tuple[int, ...]:
        """Return the ids of a text that its answer repeats."""
        return tuple(self._llm(EngineVariant()).text.encode(_REPEATING)[: self.sizes.shared[0]])

    def run(
        self, load: Sequence[ClaimRequest], variant: EngineVariant, *, in_turn: bool = False
    ) -> RunCounts:
        """Serve a load to its end; ``in_turn`` one after the other."""
        engine, records = self._llm(variant).engine, list[Record]()
        engine.listeners.append(records.append)
        try:
            if in_turn:
                for one in load:
                    _serve(engine, [one])
            else:
                _serve(engine, load)
        finally:
            engine.listeners.remove(records.append)
        return counted(records)

    def close(self) -> None:
        """Give all models up."""
        while self._loaded:
            self._loaded.popitem()[1].close()


def _serve(engine: Engine, load: Sequence[ClaimRequest]) -> None:
    """Let requests come when they are due, and end each when its answer is long enough."""
    coming = sorted(load, key=lambda one: one.arrival_s)[::-1]
    begin_s, missing = time.monotonic(), dict[int, int]()
    while coming or engine.has_work():
        now_s = time.monotonic() - begin_s
        while coming and coming[-1].arrival_s <= now_s:
            one = coming.pop()
            params = SamplingParams(temperature=0.0, max_tokens=one.max_tokens, ignore_eos=True)
            missing[engine.add(one.prompt, params)] = one.num_new
        if not engine.has_work():
            time.sleep(max(0.0, coming[-1].arrival_s - now_s))
            continue
        for event in engine.step(Load()):
            request_id = event.seq_id[0]
            missing[request_id] -= event.token is not None
            if missing[request_id] == 0 and event.finish_reason is None:
                engine.abort(request_id)
