"""What papers say that each technique brings: facts, with their source."""

from __future__ import annotations

from typing import NamedTuple


class Claim(NamedTuple):
    """A figure of a paper.

    Attributes:
        text: the figure as it is cited.
        low, high: the factor; equal where it is one number.
        paper: who says it, and when.
        setting: of what system, in a few words.
    """

    text: str
    low: float
    high: float
    paper: str
    setting: str


CLAIMS = {
    "iteration-level batching": Claim(
        "36.9x", 36.9, 36.9, "Yu et al., Orca, 2022",
        "the rate at equal latency, 175B over pipelines, against other kernels",
    ),
    "continuous batching": Claim(
        "23x", 23, 23, "Daniel et al., Anyscale, 2023",
        "13B on an A100 against static batches of another server",
    ),
    "paged KV cache": Claim(
        "2-4x", 2, 4, "Kwon et al., vLLM, 2023", "13B to 175B on A100s against reservation"
    ),
    "prompts in pieces": Claim(
        "2.3x", 2.3, 2.3, "Holmes et al., FastGen, 2024", "the rate at a service level, 70B"
    ),
    "tail of a token": Claim(
        "3.7x", 3.7, 3.7, "Holmes et al., FastGen, 2024", "the tail of a token's time, 70B"
    ),
    "prefix cache": Claim(
        "up to 6.4x", 1, 6.4, "Zheng et al., SGLang, 2024", "programs that share most of a prompt"
    ),
    "drafts": Claim(
        "2-3x", 2, 3, "Leviathan et al., 2023", "a small model drafts for one stream of T5-XXL"
    ),
    "lookahead": Claim(
        "1.5-2.3x", 1.5, 2.3, "Fu et al., 2024", "one stream on an A100, many guesses in a step"
    ),
    "weights in 4 bits": Claim(
        "2.7-3.9x", 2.7, 3.9, "Lin et al., AWQ, 2024", "one stream on a GPU, against 16 bits"
    ),
    "KV cache in fewer bits": Claim(
        "2.4-3.5x", 2.35, 3.47, "Liu et al., KIVI, 2024", "larger batches, with 2 bits"
    ),
    "attention in tiles": Claim(
        "2-4x", 2, 4, "Dao et al., FlashAttention, 2022", "attention alone, on an A100"
    ),
}  # fmt: skip
