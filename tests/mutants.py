"""Do the pure tests notice? Break the core by hand, one way at a time, and see them fail.

Of the planner, what counts memory and what cuts a request's time are broken too.

    python -m tests.mutants [EVERY]

EVERY of 3 takes each third of them, for a run that must be short.
Each mutant is a copy of src and tests with one piece of text replaced. Printed is a row for each;
exit status 1 when the tests pass on one, or when its text is not found exactly once any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PURE_TESTS = ("tests/core",)
PLANNER_TESTS = ("tests/planner/memory/test_ledger.py", "tests/foresight/test_explain.py")
NEEDED = (
    "src",
    *PURE_TESTS,
    *PLANNER_TESTS,
    *("tests/__init__.py", "tests/conftest.py", "tests/fakes.py", "tests/own_home.py"),
    *("tests/data/configs.json", "tests/data/decisions.json"),
    *("tests/model/__init__.py", "tests/model/cost/__init__.py"),
    *("tests/model/cost/published_configs.py", "tests/model/cost/matrix_bytes.py"),
    *("tests/foresight/__init__.py", "tests/foresight/runs.py", "tests/planner/__init__.py"),
)
WORKERS = 2


class Mutant(NamedTuple):
    """A wrong core: in this file below src/ridgeline, ``old`` is replaced by ``new``."""

    file: str
    old: str
    new: str
    why: str  # what is wrong with it


BLOCKS, CACHE, REQUEST = "core/cache/kvcache.py", "core/cache/kvcache.py", "core/request.py"
SCHEDULER, POLICIES, ENGINE = (
    "core/scheduling/scheduler.py",
    "core/scheduling/policies.py",
    "core/engine.py",
)
QUEUES, FOLD, ADMISSION = (
    "core/scheduling/queues.py",
    "core/commit.py",
    "core/scheduling/admission.py",
)
STATES = "core/cache/state_slots.py"
SEARCH = "core/decoding/search.py"
PARAMS, TEXT = "core/params.py", "core/decoding/text.py"
SPECULATE, LOOKUP = "core/scheduling/speculate.py", "core/decoding/drafts/lookup.py"
DEPTH, SUFFIX = "core/decoding/drafts/depth.py", "core/decoding/drafts/suffix.py"
JACOBI, DRAFT_MODEL = "core/decoding/drafts/jacobi.py", "core/decoding/drafts/draft_model.py"
PACE = "core/decoding/drafts/pace.py"
LEDGER, EXPLAIN = "planner/memory/ledger.py", "foresight/explain.py"
WHAT_FITS = "planner/memory/placement.py"

MUTANTS = (
    Mutant(BLOCKS, "content is None or content.parent != parent or content.tokens != tokens",
           "content is None", "equal keys are believed"),
    Mutant(BLOCKS, "self.free.popitem(last=False)", "self.free.popitem(last=True)",
           "the freshest is evicted"),
    Mutant(BLOCKS, "self.free.move_to_end(block, last=False)", "pass",
           "unknown content outlives known"),
    Mutant(BLOCKS, "del self.index[self.group[block]][evicted.key]", "pass",
           "what was evicted is still found"),
    Mutant(STATES, "checkpoint is not None and checkpoint[0] is contents[prefix[count - 1]]",
           "checkpoint is not None",
           "a checkpoint outlives what its block held"),
    Mutant(STATES, "self.copies.append((source, seq.state))", "pass",
           "a prefix is resumed without its state"),
    Mutant(STATES, "self.copies.append((parent.state, child.state))", "pass",
           "a fork begins with a foreign state"),
    Mutant(STATES, "if at >= seq.publish_at and num_taken", "if num_taken",
           "a state is kept that is behind already"),
    Mutant(STATES, "if is_right else (other, seq.state)", "if True else (other, seq.state)",
           "a state has seen a wrong draft"),
    Mutant(STATES, "            self.settle(seq, is_right=True)\n", "",
           "a state from before drafts outlives its sequence"),
    Mutant(STATES, "if len(self._rollback) + len(self._saving) >= self.num_checkpoints:",
           "if not (self.free or self.checkpoints):", "drafts take the slots of forks"),
    Mutant(FOLD, "            if states is None:\n", "            if True:\n",
           "right drafts are computed, but not in the state from before them"),
    Mutant(CACHE, "work.save[: -1 if work.drafts else None]", "work.save",
           "the state before drafts becomes a checkpoint"),
    Mutant(FOLD, "is_right = i == len(drafts)", "is_right = True",
           "a state has seen a wrong draft, and the sequence does not know"),
    Mutant(SPECULATE, "most = MOST_DRAFTS + 1 if is_again else 1", "most = 1",
           "right drafts that are computed again have no drafts behind"),
    Mutant(SPECULATE, "item.seeds and item.start >= item.sampling.prompt_len", "True",
           "drafts behind a prompt"),
    Mutant(STATES, "if pair[1] != seq.state]", "if True]",
           "a state is copied over its slot's next holder"),
    Mutant(CACHE, "end = self.states.num_resumable(prefixes[0], self.pool.content)", "pass",
           "blocks are adopted without a state"),
    Mutant(STATES, "        self.checkpoints.clear()\n", "",
           "checkpoints outlive a step that failed"),
    Mutant(STATES, "        self.checkpoints.move_to_end(prefix[-1])\n", "",
           "a checkpoint in use is evicted first"),
    Mutant(FOLD, "            queues.kv.publish_states(seq, work)\n", "            pass\n",
           "no state is kept"),
    Mutant(CACHE, "seq.keys[i], chain[i - 1] if i else seq.request.cache_root, tokens",
           "seq.keys[i], seq.request.cache_root, tokens",
           "a block is told by its own tokens alone"),
    Mutant(CACHE, "seq.keys[i - 1] if i else seq.request.cache_root\n",
           "seq.keys[i - 1] if i else b\"\"\n",
           "keys do not tell roots apart"),
    Mutant(CACHE, "chain[i - 1] if i else seq.request.cache_root, tokens",
           "chain[i - 1] if i else b\"\", tokens",
           "a root is told by its key alone"),
    Mutant(REQUEST, "self.cache_root += self.adapter.digest", "pass", "prefixes cross adapters"),
    Mutant(SCHEDULER, "adapter=request.adapter.number", "adapter=0",
           "the backend is not told of the adapter"),
    Mutant(CACHE, "key=parent_key, digest_size=16", "digest_size=16", "keys are not chained"),
    Mutant(CACHE, " - sum(refs[block] == 0 for block in cached_blocks)", "",
           "free blocks of the prefix count twice"),
    Mutant(CACHE, "refs[table[written]] > 1", "refs[table[written]] > 2",
           "two write into one block"),
    Mutant(CACHE, "self.copies.append((old, table[written]))", "pass",
           "copy-on-write without the copy"),
    Mutant(CACHE, "sum(grow) + sum(shared) > num_free", "sum(grow) > num_free",
           "the copy's block is not asked for"),
    Mutant(CACHE, "self.pool.share(twin)", "pass", "a twin is used without being held"),
    Mutant(CACHE, "break  # another content has this key: stay private", "continue",
           "publishing goes on behind a private block"),
    Mutant(CACHE, "child.capacity = parent.capacity = full", "child.capacity = full",
           "after a fork the parent writes in place"),
    Mutant(CACHE, "range((len(seq.tokens) - 1) // self.block_size)",
           "range(len(seq.tokens) // self.block_size)",
           "a cached prompt leaves nothing to compute"),
    Mutant(CACHE, " or params.prompt_logprobs is not None", "",
           "prompt logprobs of a cached prefix are missing"),
    Mutant(CACHE, "pair for pair in self.copies if self.pool.refs[pair[1]]",
           "pair for pair in self.copies",
           "copies into blocks that were given back"),
    Mutant(CACHE, "in reversed(held_blocks(seq))", "in held_blocks(seq)",
           "roots are evicted before leaves"),
    Mutant(CACHE, "max(num_tokens - window + 1, 0)", "max(num_tokens - window + 2, 0)",
           "a block is given back that the next token sees"),
    Mutant(CACHE, "sum(refs[block] == 1 for block in left)", "len(left)",
           "blocks that others hold too count as free"),
    Mutant(CACHE, "self.blocks_for(reach) + 1", "self.blocks_for(reach)",
           "a window that begins within a block is said to need one less"),
    Mutant(CACHE, "if NOWHERE in visible_blocks:", "if False:",
           "a prefix is adopted whose window has a hole"),
    Mutant(SCHEDULER, "by_order(one) > by_order(seq)", "one is not seq",
           "the young take from the old"),
    Mutant(SCHEDULER, "key=by_order, reverse=True", "key=by_order",
           "the oldest of the young gives way first"),
    Mutant(SCHEDULER, "left += self._withdraw(victims,", "self._withdraw(victims,",
           "tokens taken back are lost"),
    Mutant(SCHEDULER, "del granted[i], work[i]", "pass",
           "a preempted sequence stays in the step"),
    Mutant(SCHEDULER, "slots_taken + seq.num_slots > self.queues.max_num_seqs",
           "slots_taken > self.queues.max_num_seqs",
           "one slot too many"),
    Mutant(SCHEDULER, "least = seq.num_pending - self.queues.kv.num_cached(seq)",
           "least = seq.num_pending",
           "a cached prompt waits for a budget of its whole length"),
    Mutant(QUEUES, "self.slots_taken() >= self.max_num_seqs", "not self.running",
           "answers fork without a slot"),
    Mutant(SCHEDULER, "                    unnamed = refusal\n", "",
           "who waits does not say why"),
    Mutant(SCHEDULER, "if preempted and not (queues.is_shared and", "if preempted and (False and",
           "someone is admitted into the room just made"),
    Mutant(SCHEDULER, "by_order(seq) < by_order(preempted[-1])", "False",
           "only one of those within their share enters in a step"),
    Mutant(SCHEDULER, "        queues.share_out()\n", "",
           "nobody gives a slot back to another owner"),
    Mutant(SCHEDULER, "or one.is_over_share > seq.is_over_share else ()", "else ()",
           "what is over a share keeps its slots"),
    Mutant(SCHEDULER, "one.request.owner == mine.owner", "True",
           "who is due takes from others what is their share"),
    Mutant(SCHEDULER, "max(seq.num_slots, len(seq.seeds))", "1",
           "answers to come count for nothing"),
    Mutant(QUEUES, "seq.num_slots = min(seq.num_slots, share)", "pass",
           "a search wider than its share never begins"),
    Mutant(QUEUES, "= is_idle or ", "= ",
           "idle beams keep the slots that others of their search need"),
    Mutant(QUEUES, "before > 0 and ", "",
           "the oldest of an owner is over its share"),
    Mutant(QUEUES, "s.num_slots, -(len(s.tokens) // per * most // have)", "s.num_slots, 1",
           "long texts keep the cache from others"),
    Mutant(QUEUES, "seq.is_over_share = Status.PAUSED, False", "_ = Status.PAUSED, False",
           "who rests stays over its share"),
    Mutant(ADMISSION, "return 0 if is_short(name) else next(", "return next(",
           "a full engine is full for all"),
    Mutant(ADMISSION, "[*others, most]", "[most]",
           "a tenant enters beyond its share"),
    Mutant(ADMISSION, "inside[prompt.tenant] += prompt.num_seqs", "pass",
           "a share is entered again and again"),
    Mutant(ADMISSION, "return bool(others) and ", "return ",
           "alone a tenant enters though no slot is free"),
    Mutant(POLICIES, "num_generated for seq in others) %", "num_generated for seq in others[:0]) %",
           "the same few of an owner decode in all steps"),
    Mutant(POLICIES, "max(min_chunk, len(decoding) - 1 - len(others))", "min_chunk",
           "an owner decodes fewer than the others"),
    Mutant(SCHEDULER, "seq.seeds if num_tokens == pending else ()", "seq.seeds",
           "tokens are sampled in the middle of a prompt"),
    Mutant(QUEUES, "        del self.alive[seq.id]\n", "",
           "an aborted sequence goes on"),
    Mutant(FOLD, "    queues.kv.forget_copies()\n", "",
           "copies are made again and again"),
    Mutant(FOLD, "if len(work.seeds) > 1:", "if len(tokens) > 2:",
           "forks are guessed from the count of tokens"),
    Mutant(ADMISSION, "finish += num_tokens", "finish += 0",
           "of one key the first come first"),
    Mutant(ADMISSION, "max(self._served.get(tenant, 0), floor)", "floor",
           "a counter is lowered by coming back"),
    Mutant(ADMISSION, "tenant.now += prompt.num_tokens / len(tenant.left)", "pass",
           "a long request is passed for ever"),
    Mutant(ADMISSION, "                short_tokens -= prompt.num_tokens", "                pass",
           "short prompts have room without end"),
    Mutant(ADMISSION, "num_inside(prompt.item)) + prompt.num_seqs", "num_inside(prompt.item))",
           "what enters now is not held"),
    Mutant(ADMISSION, "not num_held or ", "",
           "a prompt of many answers never enters"),
    Mutant(POLICIES, "num_reserved = min(sum(shorter), left // 2)", "num_reserved = 0",
           "the oldest prompt takes all"),
    Mutant(POLICIES, "is_shared or (is_read and decoding > 0)", "is_shared or decoding > 0",
           "prompts are held back though nobody reads along"),
    Mutant(FOLD, "parent.seeds = parent.seeds[:1]", "pass",
           "a parent forks at every step"),
    Mutant(QUEUES, "self.kv.release(seq)\n                seq.status, seq.is_over_share",
           "seq.status, seq.is_over_share",
           "who rests keeps its blocks"),
    Mutant(QUEUES, "if seq.status is Status.PAUSED:\n", "if False:\n",
           "who rests never goes on"),
    Mutant(REQUEST, "max_model_len - (not params.pool):", "max_model_len:",
           "no room for an answer"),
    Mutant(REQUEST, "() if params.ignore_eos else self.eos_ids", "self.eos_ids",
           "ignore_eos is ignored"),
    Mutant(REQUEST, "(seed + i * _SEED_STRIDE)", "(seed)",
           "all answers are the same"),
    Mutant(POLICIES, "for seq in running or waiting:", "for seq in (*running, *waiting):",
           "static is orca"),
    Mutant(POLICIES, "if seq.num_pending == 1]", "if seq.num_pending <= 2]",
           "a sequence is requested twice"),
    Mutant(ENGINE, "self.scheduler.retract()\n            times_s", "times_s",
           "a failed step counts as done"),
    Mutant(ENGINE, "self.scheduler.retract()\n            raise", "raise",
           "a step whose drafts failed is half decided"),
    Mutant(ENGINE, "request.error or event.error", "event.error",
           "an error is forgotten"),
    Mutant(ENGINE, "request.scheduled_s is None", "True",
           "times are those of the last admission"),
    Mutant(FOLD, "if token != draft or seq.status", "if seq.status",
           "every draw is kept, whatever its draft"),
    Mutant(FOLD, "seq.constraint.accept(token)", "pass",
           "a constraint does not see what is said"),
    Mutant(FOLD, "beam.constraint.accept(token)", "pass",
           "a beam's constraint does not see what is said"),
    Mutant(FOLD, "beam.constraint = constraint.fork()", "pass",
           "a beam that forks begins its constraint again"),
    Mutant(FOLD, "if event.finish_reason:  # a form", "if False:  # a form",
           "an answer goes on behind its form's end"),
    Mutant(SCHEDULER, "(item.seeds or item.top)", "item.seeds",
           "beams have no masks"),
    Mutant(FOLD, "if seq.constraint.is_over:", "if False:",
           "an answer goes on although nothing may follow"),
    Mutant(SCHEDULER, "drafts = item.tokens[len(item.tokens) - item.drafts :]", "drafts = ()",
           "no masks behind drafts"),
    Mutant(SPECULATE, "guess.tokens[: constraint.num_valid(guess.tokens)]", "guess.tokens",
           "drafts that the constraint rules out are verified"),
    Mutant(FOLD, "len(work.tokens) - work.drafts)", "len(work.tokens))",
           "drafts count as computed before they are known to be right"),
    Mutant(SPECULATE, "guess[:left]", "guess",
           "drafts know no budget"),
    Mutant(SPECULATE, "if len(item.seeds) == 1 and most > 0:", "if item.seeds and most > 0:",
           "drafts before a fork"),
    Mutant(SPECULATE, " and kv.reserve_drafts(seq, item.start + len(tokens))", "",
           "drafts without blocks"),
    Mutant(SPECULATE, "table=seq.table", "table=item.table",
           "the table is that of before the drafts"),
    Mutant(DEPTH, "goodput > rate * _LEAST_GAIN", "goodput > 0",
           "all drafts pay"),
    Mutant(SPECULATE, "_text(seq, guess)", "_text(seq, Guess((), 0))",
           "guesses are not compared with what came"),
    Mutant(SCHEDULER, "self.speculation is not None and not preempted",
           "self.speculation is not None",
           "drafts in a step that took blocks from somebody"),
    Mutant(ENGINE, "tokens[: num_kept[work.seq_id]] if work.drafts else tokens", "tokens",
           "records keep draws behind the end"),
    Mutant(CACHE, "                    is_whole = False\n", "",
           "a cut for one group shows another a hole"),
    Mutant(CACHE, "self.pool.take(group) for _ in range(grow[group])",
           "self.pool.take() for _ in range(grow[group])",
           "blocks of all groups are the first one's"),
    Mutant(CACHE, "[tuple(table) for table in tables])\n        seq.capacity = min(",
           "[tuple(table) for table in tables])\n        seq.capacity = max(",
           "the longest table says how much can be written"),
    Mutant(CACHE, "self._no_windows if params.penalty_alpha else self.windows", "self.windows",
           "a contrastive search loses states"),
    Mutant(CACHE, "self.pool.index[group][content.key]", "self.pool.index[0][content.key]",
           "a twin is one of another group"),
    Mutant(CACHE, "if NOWHERE in blocks:", "if NOWHERE in blocks[:0]:",
           "a block that is gone is published"),
    Mutant(CACHE, "not self._is_roomy(sum(need))", "sum(need) > len(self.pool.free)",
           "drafts empty the pool"),
    Mutant(LOOKUP, "if same > length:", "if same >= length:",
           "an older match of equal length wins"),
    Mutant(LOOKUP, "            drafts = drafts[: drafts.index(NO_TOKEN)]\n", "            pass\n",
           "a guess runs from one text into the next"),
    Mutant(SUFFIX, "self._pasts.get(seq.request.owner)", "next(iter(self._pasts.values()), None)",
           "others' answers are guessed from"),
    Mutant(SUFFIX, "        if length < shortest:", "        if match_end < 0:",
           "another key with the same hash counts as a match"),
    Mutant(SUFFIX, "            if place < self._begin:", "            if place < 0:",
           "answers that were dropped are followed"),
    Mutant(SUFFIX, "        if 2 * self._begin > len(self._text):", "        if False:",
           "what was dropped is never freed"),
    Mutant(SUFFIX, "while self._num_tokens > self._most_tokens", "while False",
           "every answer is kept for ever"),
    Mutant(JACOBI, "start=1):", "start=0):",
           "n-grams are of the wrong places"),
    Mutant(JACOBI, "if rounds := self._rounds.get(work.seq_id):",
           "if rounds := self._rounds.setdefault(work.seq_id, _Rounds()):",
           "requests that were aborted are kept for ever"),
    Mutant(SCHEDULER, "one.request.order > seq.request.order", "False",
           "two searches wait for each other"),
    Mutant(SCHEDULER, "one.request.order > seq.request.order", "True",
           "a search takes from itself, and from older ones"),
    Mutant(SCHEDULER, "left += self._withdraw([victim],", "self._withdraw([victim],",
           "tokens of who gave way are lost"),
    Mutant(SCHEDULER, "one.request.due_s == inf > mine.due_s", "mine.due_s < inf",
           "who is due takes from who is due"),
    Mutant(POLICIES, "*waiting], key=_due_s)", "*waiting], key=_num_pending)",
           "who is due does not go first"),
    Mutant(POLICIES, "key=lambda seq: (*_due_s(seq), ", "key=lambda seq: (",
           "short prompts pass those that are due"),
    Mutant(POLICIES, "(few * num, 0) if is_shared else ", "",
           "a flood of prompts makes the steps of another owner's answer long"),
    Mutant(POLICIES, "0 or seq is runs:", "0:", "one waits for blocks of one that never runs"),
    Mutant(POLICIES, "part = -(-left // max(1, num - i))", "part = left",
           "a newcomer waits behind the shorter prompts of another owner's flood"),
    Mutant(POLICIES, "(group[0].is_over_share, sum", "(sum", "over a share goes first"),
    Mutant(REQUEST, "self.order = self.due_s, self.id", "self.order = self.id, self.id",
           "nobody is due"),
    Mutant(SCHEDULER, "slots -= victim.num_slots", "pass",
           "a slot that was taken stays taken"),
    Mutant(SCHEDULER, "if width * need > have:", "if need > have:",
           "beams that the pool cannot hold are let in"),
    Mutant(SCHEDULER, "request.search.num_candidates if is_last else 0",
           "request.search.num_candidates",
           "candidates in the middle of a prompt"),
    Mutant(FOLD, "        if place not in parents:\n            queues.drop(beam)\n", "",
           "beams that nobody continues go on"),
    Mutant(FOLD, "beam.candidates, beam.num_slots = (), 1", "beam.candidates = ()",
           "the first beam keeps the slots of all"),
    Mutant(FOLD, "        if beam in request.sequences:", "        if False:",
           "two beams are one sequence"),
    Mutant(QUEUES, "parent.status is not Status.RUNNING or ", "",
           "the fork of a preempted beam runs without being admitted"),
    Mutant(REQUEST, "params.num_seqs if self.search else 1", "1",
           "beams have no slots when they fork"),
    Mutant(SEARCH, "place >= self._width and (ends or ", "(ends and place > 99) or (",
           "an answer may end at any place"),
    Mutant(SEARCH, "enumerate(self._sorted(ranked, length))", "enumerate(self._sorted(ranked, 99))",
           "min_tokens is ignored"),
    Mutant(SEARCH, "        if self._early_stopping is True:\n            return True\n", "",
           "with early stopping a full search goes on"),
    Mutant(SEARCH, "best <= self._complete[-1].score", "best < self._complete[-1].score",
           "an equal beam keeps a search alive"),
    Mutant(DRAFT_MODEL, "while same < end and shadow.tokens[same] == seq.tokens[same]:",
           "while same < end:", "what an answer did not take of a guess stays in the cache"),
    Mutant(DRAFT_MODEL, "len(seq.tokens) - 1)  # the logits", "len(seq.tokens))  # the logits",
           "nothing is left to compute behind a guess that was right"),
    Mutant(DRAFT_MODEL, "if name not in wanted]", "if False]",
           "shadows of who waits keep their blocks"),
    Mutant(DRAFT_MODEL, "            self.kv.publish(shadow)\n", "            pass\n",
           "each answer to a prompt computes it again"),
    Mutant(PACE, "chance *= self._chance", "chance *= 1",
           "a guess is as likely right far ahead as near"),
    Mutant(SEARCH, "- alpha * similarity", "+ alpha * similarity",
           "what repeats the text is preferred"),
    Mutant(SEARCH, "top = tuple(ranked[place]", "top = tuple(ranked[0]",
           "logprobs are those behind another candidate"),
    Mutant(FOLD, "        queues.swap(chosen, beams[0])\n", "",
           "a settled token leaves the answer in another beam's place"),
    Mutant(CACHE, "self.enable_prefix_caching and not seq.request.params.penalty_alpha",
           "self.enable_prefix_caching", "blocks without states are adopted"),
    Mutant(PARAMS, "isinstance(value, bool) or", "",
           "true is a number"),
    Mutant(PARAMS, "return dict(biases)", "return biases",
           "the caller can change what was checked"),
    Mutant(TEXT, "min(matches)", "max(matches)",
           "the last stop string counts, not the first"),
    Mutant(TEXT, "range(longest, 0, -1)", "range(1, longest + 1)",
           "too little is held back"),
    Mutant(TEXT, "max(map(len, self._stop)) - 1", "max(map(len, self._stop)) - 2",
           "the last but one character is not held back"),
    Mutant(REQUEST, "longest = 0 if params.pool else max_model_len - len(prompt)",
           "longest = max_model_len - len(prompt)", "a vector is charged for an answer"),
    Mutant(REQUEST, "0 if self.search or params.pool else", "0 if self.search else",
           "a vector draws a token besides"),
    Mutant(SCHEDULER, "elif request.params.pool and is_last:",
           "elif request.params.pool:", "a piece of a text has a vector"),
    Mutant(ENGINE, "has_news = event.token is not None or event.vector is not None",
           "has_news = event.token is not None", "a vector is never there in time"),
    Mutant(LEDGER, "-(-memory.context // size)", "memory.context // size",
           "the last block of a sequence takes nothing"),
    Mutant(LEDGER, "return min(stages, key=lambda ledger:", "return max(stages, key=lambda ledger:",
           "the emptiest stage decides"),
    Mutant(LEDGER, "if shape.is_tied and not is_first:", "if False:",
           "a head on a stage of its own has no weights"),
    Mutant(LEDGER, "min(num_ranks, matrix.ways)", "num_ranks",
           "ranks divide what each of them must have whole"),
    Mutant(WHAT_FITS, "while high - low > 1:", "while high - low > 2:",
           "one more would fit"),
    Mutant(EXPLAIN, "[*self.cuts, (finish_ns, \"\", None)]", "self.cuts",
           "the last piece is left out"),
    Mutant(EXPLAIN, "if start < max(self.num_computed.get(index, 0), self.num_computed_prompt):",
           "if False:",
           "what is computed again counts as new"),
    Mutant(EXPLAIN, "all_ns if actual_ns > _SLOW * all_ns else actual_ns", "actual_ns",
           "the machine is never slow"),
    Mutant(EXPLAIN, "if request_id in step[\"paused\"]:", "if False:",
           "the client is never waited for"),
    Mutant(EXPLAIN, "for step in reversed(steps):", "for step in steps:",
           "of several answers the first to run counts"),
)  # fmt: skip


# The tests, all of them, must pass on this one, or their failures mean nothing.
UNBROKEN = Mutant(BLOCKS, "class BlockPool:", "class BlockPool:", "nothing")


def apply(mutant: Mutant, folder: Path) -> bool:
    """Copy what the pure tests need, break it; False if the text is not there just once."""
    for name in NEEDED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / "src" / "ridgeline" / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    return text.count(mutant.old) == 1


def tests_of(mutant: Mutant) -> tuple[str, ...]:
    """Return the tests that must notice a mutant."""
    if mutant is UNBROKEN:
        return *PURE_TESTS, *PLANNER_TESTS
    return PURE_TESTS if mutant.file.startswith("core/") else PLANNER_TESTS


def judge(mutant: Mutant) -> tuple[str, float]:
    """Run a mutant's tests; return what became of it, and the seconds it took."""
    start_s = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not apply(mutant, folder):
            return "NOT FOUND", 0.0
        done = subprocess.run(
            [*command, "--hypothesis-profile=mutants", *tests_of(mutant)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            check=False,
        )
    verdicts = {0: "SURVIVED", 1: "killed"}  # anything else means that the tests did not run
    return verdicts.get(done.returncode, "BROKEN"), time.monotonic() - start_s


def main(every: int = 1) -> int:
    start_s = time.monotonic()
    chosen, bad = MUTANTS[::every], 0
    with ThreadPoolExecutor(WORKERS) as pool:
        unbroken, results = pool.submit(judge, UNBROKEN), pool.map(judge, chosen)
        if unbroken.result()[0] != "SURVIVED":
            pool.shutdown(cancel_futures=True)
            print("The pure tests fail as it is: mend that first.", file=sys.stderr)
            return 1
        for mutant, (verdict, seconds) in zip(chosen, results, strict=True):
            bad += verdict != "killed"
            print(f"{verdict:9} {seconds:5.1f} s  {mutant.file:18} {mutant.why}", flush=True)
    total_s = time.monotonic() - start_s
    print(f"{len(chosen) - bad} of {len(chosen)} mutants killed in {total_s:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
