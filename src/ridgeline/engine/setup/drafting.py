"""From ``--speculative-config`` to drafters, among them a draft model with its own cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.decoding.drafts.depth import Depth
from ridgeline.core.decoding.drafts.draft_model import DraftModel
from ridgeline.core.decoding.drafts.jacobi import Lookahead
from ridgeline.core.decoding.drafts.lookup import PromptLookup
from ridgeline.core.decoding.drafts.pace import Pace
from ridgeline.core.decoding.drafts.suffix import SuffixLookup
from ridgeline.core.scheduling.speculate import Drafter, Speculation
from ridgeline.core.step import Runner
from ridgeline.engine.setup.home import locate
from ridgeline.engine.setup.options import Options, SpeculativeConfig, parse_speculative
from ridgeline.engine.setup.resolve import EngineConfig, resolve
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.system.machine import available_bytes
from ridgeline.text.tokenizers.tokenizer import load_tokenizer

_CACHE_BYTES = 512 << 20  # of the draft model; answers for which it is full get no drafts


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A draft model as found on disk, and how it is to run."""

    checkpoint: Checkpoint
    config: EngineConfig


def find_small_model(options: Options, target: Checkpoint) -> SmallModel | None:
    """Return the draft model that ``options`` ask for, if they do.

    Args:
        options: of the engine; the draft model runs with the same, but for the size of its cache.
        target: the model that it drafts for.

    Raises:
        ValueError: there is no such model, its vocabulary is another, it has recurrent layers, or
            it does not fit.
    """
    wanted = parse_speculative(options.speculative_config)
    if wanted is None or wanted.model is None:
        return None
    checkpoint = load_checkpoint(locate(wanted.model).path)
    _check_same_vocabulary(target, checkpoint)
    longest = options.max_model_len or target.arch.max_position
    config = resolve(
        replace(
            options,
            kv_cache_memory=min(_CACHE_BYTES, available_bytes() // 8),
            max_model_len=min(longest, checkpoint.arch.max_position),
            enable_contrastive_search=False,
            tensor_parallel_size=1,  # on the first device: it is small
            stages=1,
            stage_port=None,
            stage_key_file=None,
        ),
        checkpoint,
        keeps_all=True,  # what is drafted is rolled back further than windows allow
    )
    if config.num_checkpoints is not None:
        raise ValueError(
            f"--speculative-config: {wanted.model} has recurrent layers, whose states cannot be "
            f"taken back to what an answer took of its drafts: name a draft model without them"
        )
    return SmallModel(checkpoint, config)


def _check_same_vocabulary(target: Checkpoint, small: Checkpoint) -> None:
    sizes = target.arch.vocab_size, small.arch.vocab_size
    tokenizers = [load_tokenizer(one.tokenizer, one.bos_id) for one in (target, small)]
    for token in range(min(sizes)):
        first, second = (tokenizer.token_bytes(token) for tokenizer in tokenizers)
        if first != second:
            raise ValueError(
                f"--speculative-config: {small.path.name} has another vocabulary: its token "
                f"{token} is {second!r}, that of {target.path.name} is {first!r}"
            )
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"--speculative-config: {small.path.name} has {sizes[1]} tokens, "
            f"{target.path.name} has {sizes[0]}: a draft model needs the same vocabulary"
        )


def new_speculation(
    config: SpeculativeConfig | None, small: SmallModel | None, runner: Runner | None
) -> Speculation | None:
    """Return what makes and weighs drafts; ``runner`` is that of the draft model."""
    if config is None:
        return None
    most = config.num_speculative_tokens
    if small is not None and runner is not None:
        pace = None if config.always else Pace(most)
        drafter = _new_draft_model(small.config, runner, pace)
        return Speculation(drafter, most=most, depth=pace)
    depth = None if config.always else Depth()
    return Speculation(_new_drafter(config), most=most, depth=depth)


def _new_draft_model(config: EngineConfig, runner: Runner, pace: Pace | None) -> DraftModel:
    return DraftModel(
        runner,
        KVCache(config.num_blocks, config.block_size),
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        pace=pace,
    )


def _new_drafter(config: SpeculativeConfig) -> Drafter:
    shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
    if config.method == "ngram":
        return PromptLookup(shortest=shortest, longest=longest)
    if config.method == "suffix":
        return SuffixLookup(shortest=shortest, longest=longest)
    return Lookahead()
