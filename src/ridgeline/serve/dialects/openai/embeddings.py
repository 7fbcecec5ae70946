"""Routes for vectors of texts: OpenAI's embeddings, and documents ranked as Cohere and Jina do it.

Texts become prompts of one stream, as those of a completion do, but vectors come instead of
answers.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import RequestRecord
from ridgeline.core.request import Request as EngineRequest
from ridgeline.core.step import Event, FinishReason
from ridgeline.engine.outputs import cosine, paired, shaped
from ridgeline.serve.answer import fields
from ridgeline.serve.answer.dialect import OPENAI
from ridgeline.serve.answer.protocol import EACH, TextOrIds
from ridgeline.serve.answer.reply import RawBody, Reply
from ridgeline.serve.answer.schemas import ERRORS, PromptTokensDetails, documented
from ridgeline.serve.answer.stages import PreparedRequest, Stage
from ridgeline.serve.deadlines.promise import Promise
from ridgeline.serve.dialects.openai import schemas
from ridgeline.serve.engine.request_stream import (
    RequestStream,
    StreamError,
    StreamEvent,
    StreamReader,
)
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_body import RequestModel
from ridgeline.serve.model_server import ModelServer
from ridgeline.serve.prepare import Ids

_INT64 = 1 << 63


class _Wanted(RequestModel):
    """The fields that all requests for vectors share."""

    extras = fields.VECTORS

    model: str | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=_INT64)  # vLLM's; -1: what fits
    user: str | None = Field(None, max_length=256)


class EmbeddingsRequest(_Wanted):
    """POST /v1/embeddings."""

    input: TextOrIds
    dimensions: int | None = Field(None, ge=1, lt=_INT64)
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None  # vLLM's: scale to length 1, whatever the model's files say

    @property
    def texts(self) -> list[str] | list[list[int]]:
        """The texts, also where one stands alone."""
        value: Any = self.input
        alone = isinstance(value, str) or (bool(value) and isinstance(value[0], int))
        return [value] if alone else value


class Document(RequestModel):
    """A document that stands in an object."""

    extras = fields.ANY

    text: str


def _kind_of_document(document: Any) -> str:
    return "[object]" if isinstance(document, dict | Document) else "[text]"


_Document = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Document, Tag("[object]")],
    Discriminator(_kind_of_document),
]


class RerankRequest(_Wanted):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[_Document], EACH]
    top_n: int | None = Field(None, ge=0, lt=_INT64)  # 0: all, as in vLLM
    return_documents: bool | None = None  # absent: true

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


def _kind_of_side(side: Any) -> str:
    return "[texts]" if isinstance(side, list) else "[text]"


_Side = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[list[str], EACH, Tag("[texts]")],
    Discriminator(_kind_of_side),
]


class ScoreRequest(_Wanted):
    """POST /v1/score, as vLLM has it: one text against many, or many against as many."""

    text_1: _Side
    text_2: _Side


class Vectors:
    """The vectors of a stream's prompts that are there so far.

    Attributes:
        values: by prompt.
        records: of the prompts that have ended.
        promise: nothing is promised of vectors.
    """

    num_tokens = 0  # none is generated
    is_cut, bounds = False, ""
    stages: Sequence[Stage] = ()
    promise: Promise | None = None

    def __init__(self, stream: RequestStream) -> None:
        """Wait for what ``stream`` brings."""
        self._stream = stream
        self.values: list[tuple[float, ...]] = [()] * len(stream.prompts)
        self.records: list[RequestRecord] = []
        self._requests: list[EngineRequest] = []

    def take(self, event: StreamEvent) -> None:
        """Take an event. Raises StreamError."""
        index, payload = event
        if isinstance(payload, RequestRecord):
            self.records.append(payload)
        elif isinstance(payload, EngineRequest):
            self._requests.append(payload)
        elif isinstance(payload, Event):
            if payload.finish_reason is FinishReason.ERROR or payload.vector is None:
                raise StreamError(payload.error or "the model failed on this request")
            self.values[index] = payload.vector

    @property
    def finish_reasons(self) -> str:
        """How the prompts ended."""
        return "+".join(sorted({reason for one in self.records for reason in one.finish_reasons}))

    @property
    def num_cached(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return sum(request.num_cached_tokens for request in self._requests)

    def usage(self) -> schemas.InputUsage:
        """Return OpenAI's count of tokens, those that the model puts around a text included."""
        count = sum(map(len, self._stream.prompts))
        details: PromptTokensDetails = {"cached_tokens": self.num_cached}
        return {"prompt_tokens": count, "total_tokens": count, "prompt_tokens_details": details}

    def timings(self) -> dict[str, Any]:
        """Return the engine's times, nothing if no vector came."""
        firsts = [one.first_token_s for one in self.records if one.first_token_s is not None]
        starts = [one.scheduled_s for one in self.records if one.scheduled_s is not None]
        if not firsts or not starts:
            return {}
        arrival_s = self._stream.arrival_s
        return {
            "queue_time_ms": 1e3 * (max(starts) - arrival_s),
            "time_to_first_token_ms": 1e3 * (min(firsts) - arrival_s),
        }


class VectorWriter:
    """An answer made of vectors, which comes whole."""

    stream_type, ping = "application/json", b""

    def __init__(
        self, vectors: Vectors, make: Callable[[Vectors], Mapping[str, Any] | RawBody]
    ) -> None:
        """Write what ``make`` makes of the vectors once all are there."""
        self._vectors, self._make = vectors, make

    def whole(self) -> Mapping[str, Any] | RawBody:
        """Return the whole answer."""
        return self._make(self._vectors)

    def take(self, event: StreamEvent) -> list[bytes]:
        """Take an event; return nothing."""
        self._vectors.take(event)
        return []

    def ending(self) -> bytes:
        """Return nothing."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """Return the error's object."""
        return error.encode()


def add_embeddings(app: FastAPI, server: ModelServer) -> None:
    """Add the routes to an application."""
    _add_vectors(app, server)
    _add_ranks(app, server)
    _add_scores(app, server)


def _add_vectors(app: FastAPI, server: ModelServer) -> None:
    @app.post("/v1/embeddings", responses=ERRORS | documented(schemas.EmbeddingList))
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        """Return the vectors of texts."""
        server.check_open(body.model)
        normalises = server.text.normalises if body.normalize is None else body.normalize
        check_dimensions(server, body.dimensions)
        make = partial(shaped, dimensions=body.dimensions, normalises=normalises)
        packs = body.encoding_format == "base64"

        def answer(vectors: Vectors) -> schemas.EmbeddingList:
            rows = [make(vector) for vector in vectors.values]
            data: list[schemas.Embedding] = [
                {"object": "embedding", "index": i, "embedding": _packed(one) if packs else one}
                for i, one in enumerate(rows)
            ]
            return {
                "object": "list",
                "data": data,
                "model": server.name,
                "usage": vectors.usage(),
            }

        return await vectors_of(server, request, body, body.texts, "input", answer)


def _add_ranks(app: FastAPI, server: ModelServer) -> None:
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):

        @app.post(
            path,
            responses=ERRORS | documented(schemas.Reranked),
            include_in_schema=path == "/v1/rerank",
        )
        async def rerank(body: RerankRequest, request: Request) -> Response:
            """Rank documents by how relevant they are to a query."""
            server.check_open(body.model)
            texts, screen = body.texts, server.stages.screen()
            shown = [screen.shown(one) for one in texts] if screen else texts

            def rank(index: int, score: float) -> schemas.Rank:
                one: schemas.Rank = {"index": index, "relevance_score": score}
                if body.return_documents is not False:
                    one["document"] = {"text": shown[index]}
                return one

            def answer(scores: list[float], usage: schemas.InputUsage) -> schemas.Reranked:
                order = sorted(range(len(scores)), key=lambda i: -scores[i])
                return {
                    "id": f"rerank-{request.state.request_id}",
                    "model": server.name,
                    "usage": usage,
                    "results": [rank(i, scores[i]) for i in order[: body.top_n or None]],
                }

            return await _scores_of(server, request, body, [body.query], texts, answer)


def _add_scores(app: FastAPI, server: ModelServer) -> None:
    for path in ("/v1/score", "/score"):

        @app.post(
            path,
            responses=ERRORS | documented(schemas.Scored),
            include_in_schema=path == "/v1/score",
        )
        async def score(body: ScoreRequest, request: Request) -> Response:
            """Say how near texts are to each other."""
            server.check_open(body.model)
            ones, others = ([x] if isinstance(x, str) else x for x in (body.text_1, body.text_2))

            def answer(scores: list[float], usage: schemas.InputUsage) -> schemas.Scored:
                return {
                    "id": f"score-{request.state.request_id}",
                    "object": "list",
                    "created": int(request.state.created.timestamp()),
                    "model": server.name,
                    "data": [
                        {"index": i, "object": "score", "score": score}
                        for i, score in enumerate(scores)
                    ],
                    "usage": usage,
                }

            return await _scores_of(server, request, body, ones, others, answer)


def check_dimensions(server: ModelServer, dimensions: int | None) -> None:
    """Raise ApiError if the model's vectors have fewer values."""
    try:
        shaped((0.0,) * server.text.vector_size, dimensions)
    except ValueError as error:
        raise ApiError(400, str(error), param="dimensions", code="invalid_value") from None


async def vectors_of(
    server: ModelServer,
    request: Request,
    body: Any,
    texts: list[str] | list[list[int]],
    param: str,
    answer: Callable[[Vectors], Mapping[str, Any] | RawBody],
) -> Reply:
    """Return the reply with what ``answer`` makes of the texts' vectors. Raises ApiError.

    ``param`` is the field that the texts stand in; ``body`` says whether they are cut.
    """
    try:
        server.text.check_vectors()
    except ValueError as error:
        raise ApiError(400, str(error), param="model", code="unsupported_endpoint") from None
    server.check_count(len(texts), param)
    truncate_to = body.truncate_prompt_tokens
    prompts = await server.preparer.from_wholes(texts, param, truncate_to)
    return await _reply(server, request, body, prompts, param, answer)


async def _scores_of(
    server: ModelServer,
    request: Request,
    body: RerankRequest | ScoreRequest,
    ones: list[str],
    others: list[str],
    answer: Callable[[list[float], schemas.InputUsage], Mapping[str, Any]],
) -> Reply:
    """Return the reply with what ``answer`` makes of the scores of pairs, and of the usage.

    Raises ApiError.
    """
    param = "documents" if isinstance(body, RerankRequest) else "text_2"
    server.check_count(len(others), param)
    try:
        pairs = paired(ones, others)
    except ValueError as error:
        raise ApiError(400, str(error), param="text_1", code="invalid_value") from None
    prepare, truncate_to = server.preparer, body.truncate_prompt_tokens
    if server.text.has_scores:
        prompts = await prepare.from_pairs(pairs, param, truncate_to)
        return await _reply(
            server,
            request,
            body,
            prompts,
            param,
            lambda vectors: answer([vector[0] for vector in vectors.values], vectors.usage()),
        )
    texts = list(dict.fromkeys((*ones, *others)))
    server.check_count(len(texts), param)
    prompts = await prepare.from_wholes(texts, param, truncate_to)

    def cosines(vectors: Vectors) -> Mapping[str, Any]:
        vector_of = dict(zip(texts, vectors.values, strict=True))
        return answer([cosine(vector_of[a], vector_of[b]) for a, b in pairs], vectors.usage())

    return await _reply(server, request, body, prompts, param, cosines)


async def _reply(
    server: ModelServer,
    request: Request,
    body: Any,
    prompts: list[Ids],
    param: str,
    answer: Callable[[Vectors], Mapping[str, Any] | RawBody],
) -> Reply:
    server.check_queue(len(prompts))
    if screen := server.stages.screen():
        screen.check_features(["embeddings"])
    await server.stages.judged(request, body, prompts, param)
    params = SamplingParams(pool=server.text.pooling)
    stream = RequestStream(
        prompts,
        params,
        server.text.new_text,
        server.caller(request, "embeddings", server.name),
        StreamReader(is_growing=request.state.is_background),
    )
    server.note(request, PreparedRequest(body, server.name, server.fingerprint, params))
    vectors = Vectors(stream)
    writer = VectorWriter(vectors, answer)
    return Reply(server.of_replies, stream, vectors, body, writer, OPENAI)


def _packed(vector: list[float]) -> str:
    """Return a vector as base64 of little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
