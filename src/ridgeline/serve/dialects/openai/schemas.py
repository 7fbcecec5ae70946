"""The shapes of answers that are made of vectors."""

from __future__ import annotations

from typing import Literal, NotRequired

from ridgeline.serve.answer.schemas import ClosedDict, PromptTokensDetails


class InputUsage(ClosedDict):
    """The count of tokens where none are generated."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(ClosedDict):
    """The vector of a text; in base64 it is little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(ClosedDict):
    """The vectors of all texts, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: InputUsage


class RankedDocument(ClosedDict):
    """A document as it was sent."""

    text: str


class Rank(ClosedDict):
    """A document's place among those sent, and how relevant it is."""

    index: int
    relevance_score: float
    document: NotRequired[RankedDocument]


class Reranked(ClosedDict):
    """Documents, the most relevant first."""

    id: str
    model: str
    usage: InputUsage
    results: list[Rank]


class DocumentScore(ClosedDict):
    """How near two texts are to each other."""

    index: int
    object: Literal["score"]
    score: float


class Scored(ClosedDict):
    """The scores of all pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[DocumentScore]
    usage: InputUsage
