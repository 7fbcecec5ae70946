"""What is measured: the shapes, their prompts, and how a time becomes a rate.

Standard library only: every engine's environment imports this. Knows no engine.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Kind = Literal["decode", "prefill", "end_to_end"]
START = "start_warm"  # measured from outside: seconds from process start to first token
START_TOKENS = 37
DRAFT_TOKENS = 5  # that a peer guesses ahead, where guesses are compared


@dataclass(frozen=True, slots=True)
class Shape:
    """So many streams at once, each with so many prompt and answer tokens.

    Attributes:
        name: as in the result's JSON.
        kind: ``decode`` is the time for ``new_tokens + 1`` tokens minus the time for 1;
            ``prefill`` the time for 1 token; ``end_to_end`` the whole time.
        num_streams: prompts that are given at once, all different.
        prompt_tokens: of each.
        new_tokens: of each that are counted; in ``prefill`` the prompt's tokens are.
        samples: measurements in each process.
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        schema: JSON schema of every answer; none without one. No answer may end within
            ``new_tokens + 1`` tokens.
        beams: width of a beam search, of which the best answer counts; 1 searches nothing.
        first_text: where its prompts begin among the job's texts.
    """

    name: str
    kind: Kind
    num_streams: int
    prompt_tokens: int
    new_tokens: int
    samples: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    schema: str = ""
    beams: int = 1
    first_text: int = 0

    @property
    def num_sequences(self) -> int:
        """Sequences that grow at the same time."""
        return self.num_streams * self.beams

    @property
    def max_tokens(self) -> int:
        """Longest sequence, tokens."""
        return self.prompt_tokens + self.new_tokens + 1

    @property
    def counted_tokens(self) -> int:
        """Tokens that the rate counts, over all streams and beams."""
        if self.kind == "prefill":
            return self.num_streams * self.prompt_tokens
        return self.num_sequences * self.new_tokens


_DECODE = (
    Shape("single_decode", "decode", 1, 128, 128, samples=3),
    Shape("batch16_decode", "decode", 16, 128, 128),
    Shape("batch64_decode", "decode", 64, 128, 128),
)
SHAPES = (
    *_DECODE,
    Shape("batch64_e2e", "end_to_end", 64, 128, 128),
    Shape("prefill_512", "prefill", 1, 512, 1, samples=3),
    Shape("prefill_16x128", "prefill", 16, 128, 1, samples=2),
    # OpenAI's default, and what llama.cpp's users run.
    *(replace(shape, name=f"{shape.name}_t1", temperature=1.0) for shape in _DECODE),
    *(
        replace(shape, name=f"{shape.name}_k40", temperature=0.8, top_k=40, top_p=0.95)
        for shape in _DECODE
    ),
)
NAMES = (*(shape.name for shape in SHAPES), START)


def quick_shapes() -> tuple[Shape, ...]:
    """Return the same shapes with few tokens: they show that everything runs, and nothing else."""
    return tuple(
        replace(
            shape,
            num_streams=min(shape.num_streams, 4),
            prompt_tokens=16,
            new_tokens=min(shape.new_tokens, 4),
            samples=1,
        )
        for shape in SHAPES
    )


@dataclass(frozen=True, slots=True)
class Job:
    """What one process of one engine is to do.

    Attributes:
        model: file or directory that the engine reads.
        threads: threads that compute.
        vocab_size: prompts are random token ids below it.
        seed: of the prompts; another one in each process, so that no cache of prefixes can help.
        shapes: to measure, in this order; none for a process that ends with its first token.
        dtype: what Ridgeline computes in; the peers' formats are in their files.
        drafts: whether tokens are guessed from what the text repeats (prompt lookup).
        texts: prompts to use in place of random ones, as token ids.
    """

    model: str
    threads: int
    vocab_size: int
    seed: int
    shapes: tuple[Shape, ...]
    dtype: str = "auto"
    drafts: bool = False
    texts: tuple[tuple[int, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Job:
        """Return the job that ``to_dict`` described."""
        shapes = tuple(Shape(**shape) for shape in values["shapes"])
        return Job(**(values | {"shapes": shapes, "texts": tuple(map(tuple, values["texts"]))}))


def prompts(shape: Shape, vocab_size: int, rng: random.Random) -> list[list[int]]:
    """Return ``num_streams`` prompts of random token ids, all different.

    The lowest ids are left out: many vocabularies keep their special tokens there.
    """
    ids = range(min(256, vocab_size // 2), min(vocab_size, 32_000))
    return [rng.choices(ids, k=shape.prompt_tokens) for _ in range(shape.num_streams)]
