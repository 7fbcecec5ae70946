"""A model's engine in a thread of its own, and the application over it, without a socket."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.engine.calibration import known, try_to_keep
from ridgeline.engine.llm import LLM
from ridgeline.engine.setup import identity
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.foresight.deadline import PromiseMargin
from ridgeline.foresight.step_time.fit import PredictionMonitor
from ridgeline.planner.needs import flags_of
from ridgeline.serve.aliases import Aliases
from ridgeline.serve.app import new_app
from ridgeline.serve.batches.routes import add_batches
from ridgeline.serve.batches.runner import Batches, store_of
from ridgeline.serve.engine.async_engine import AsyncEngine
from ridgeline.serve.http.keys import ANYONE, Keys
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.turns import WorkTurns
from ridgeline.serve.lora import Loras
from ridgeline.serve.observe.metrics import Metrics
from ridgeline.serve.service import Service
from ridgeline.serve.sleeping import SleepState
from ridgeline.system.machine import lower_priority

if TYPE_CHECKING:
    from ridgeline.trust.audit.log import AuditLog
    from ridgeline.trust.guards.guard_loading import Judge
    from ridgeline.trust.rules.file import RulesFile
    from ridgeline.trust.rules.policy_file import PolicyFile

_STEP_S = 10.0  # for the step under way at the end


class Answering:
    """What answers requests, put together; ``start`` is to be called on the loop.

    Attributes:
        async_engine: runs the engine.
        metrics: what is counted.
        service: what the routes share.
        app: the routes.
    """

    def __init__(
        self,
        llm: LLM,
        name: str,
        options: ServeOptions,
        keys: Keys,
        home: Path | None = None,
        audit: AuditLog | None = None,
        guards: Mapping[str, LLM] | None = None,
    ) -> None:
        """Put the parts together; what clients have belongs to one of ``keys``.

        What is known of the time of steps is read from ``home`` and kept there, if it is given, and
        so are files and batches. ``audit`` gets a line for each request. Other models, ``guards``,
        judge texts. Raises ValueError for one that cannot.
        """
        self._adapters = llm.adapters
        self._guards = {one: AsyncEngine(own.engine) for one, own in (guards or {}).items()}
        self.async_engine = AsyncEngine(llm.engine)
        self.async_engine.lost = lambda: llm.runner.lost
        trace = llm.trace
        self._score = PredictionMonitor(
            known(home, llm.path, llm.arch, llm.config),
            start=_in_quiet_thread,
            keep=partial(try_to_keep, home),
            now_s=time.time,
        )
        self.metrics = Metrics(
            name,
            self.async_engine.gauges,
            lambda: trace.num_lost if trace else 0,
            self._score,
            PromiseMargin(),
            keys.labels or (ANYONE,),
            lambda: llm.adapters.in_use,
            lambda: llm.kv_disk.counted if llm.kv_disk else {},
            lambda: audit.num_lost if audit else None,
        )
        self.async_engine.listeners += [self._score.on_record, self.metrics.on_record]
        has = {"trace": trace is not None, "audit": audit is not None}
        rules = self.rules = self._rules_of(options, keys, has)
        _set_up_text(llm.text, options)
        self.service = Service(
            llm.text,
            self.async_engine,
            self.metrics,
            options,
            name=name,
            summary=llm.summary,
            max_model_len=llm.config.max_model_len,
            facts=llm.facts,
            files=llm.file_digests,
            path=llm.path,
            plan_flags=flags_of(llm.config),
            memory=llm.memory,
            loras=Loras(llm.adapters, name, options.allow_lora_loading),
            sleep_state=SleepState(self.async_engine, llm.sleeping, options.idle_release_s),
            kept=llm.kv_disk,
            rules=rules,
            audit=audit,
            guards=partial(self._new_guards, guards or {}),
            aliases=Aliases(home),
        )
        if options.receipt_key:
            _ = self.service.signer  # a file that has no key is told now
        self.app = new_app(self.service)
        store = store_of(home, name)
        self._batches: Batches | str
        if isinstance(store, str):
            self._batches = store
        else:
            most_at_once = 2 * llm.config.max_num_seqs  # some are prepared while others run
            app = self.app
            self._batches = Batches(store, app, keys, self.service.fingerprint, most_at_once, audit)
        add_batches(self.app, self._batches, options)

    def fingerprint(self) -> str:
        """Return what all answers hang on, those of adapters and what rules let through too."""
        own = hashlib.blake2b(self.rules.now.digest if self.rules else b"")
        for name in self._adapters.names:
            own.update(json.dumps([name, self._adapters.digest_of(name).hex()]).encode())
        has_own = self.rules or self._adapters.names
        return identity.with_adapter(self.service.fingerprint, own.digest() if has_own else b"")

    def _new_guards(self, models: Mapping[str, LLM], work: WorkTurns) -> dict[str, Judge]:
        """Return the guards that these models are. Raises ValueError for one that is none."""
        if not models:
            return {}
        # Servers without one need not import this.
        from ridgeline.trust.guards.guard_loading import known_judge

        return {
            name: known_judge(name, llm.text, self._guards[name], work.prompts)
            for name, llm in models.items()
        }

    def _rules_of(
        self, options: ServeOptions, keys: Keys, has: Mapping[str, bool]
    ) -> PolicyFile | None:
        """Return the rules of a file, if there is one. Raises OSError or ValueError.

        ``has`` says whether this server has a trace, and an audit log.
        """
        if options.rules is None:
            return None
        # Servers without rules need not import this.
        from ridgeline.trust.rules.policy_file import PolicyFile

        def check(found: RulesFile) -> None:
            if has["trace"] and not found.allows_trace:
                message = "--trace writes answers as no rule has seen them: without it, or with "
                raise ValueError(f"{message}trace = true at the top of {options.rules}")
            if found.audited and not has["audit"]:
                message = f"{options.rules}: audit in [keys.{found.audited}] needs --audit DIR"
                raise ValueError(message)

        return PolicyFile(options.rules, lambda: keys.labels, self.metrics.count_rule, check)

    def start(self) -> None:
        """Begin to answer."""
        for engine in (self.async_engine, *self._guards.values()):
            engine.start()
        self.service.sleep_state.start()
        if isinstance(self._batches, Batches):
            self._batches.start()

    async def rest(self) -> None:
        """Begin no more batches; those that run go on at the next start."""
        if isinstance(self._batches, Batches):
            await self._batches.close()

    async def stop(self) -> None:
        """End the engine's thread and all that works beside it."""
        await self.rest()
        self.service.work.close()
        self.service.promises.close()
        self.service.arrivals.close()
        loop = asyncio.get_running_loop()
        for engine in (self.async_engine, *self._guards.values()):
            if not await loop.run_in_executor(None, engine.stop, _STEP_S):
                os._exit(1)  # a step does not end: stop waiting for it, all clients have been told
        self._score.close()


def _in_quiet_thread(work: Callable[[], None]) -> None:
    def run() -> None:
        lower_priority()
        work()

    threading.Thread(target=run, name="fit", daemon=True).start()


def _set_up_text(text: TextProcessor, options: ServeOptions) -> None:
    """Let texts be written and read as the options say. Raises ValueError if that cannot be."""
    if options.chat_template:
        text.use_chat_template(options.chat_template)
    text.generation_defaults |= options.sampling
    text.choose_parsers(options.tool_call_parser, options.reasoning_parser)
    text.limit_grammars(max_bytes=options.max_grammar_bytes, timeout_s=options.grammar_timeout)
