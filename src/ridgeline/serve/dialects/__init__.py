"""The APIs that clients know, and their routes whose bodies name a model: a router reads these."""

MODERATIONS = "/v1/moderations"
COUNTED = (  # no model computes anything for these
    *("/v1/responses/input_tokens", "/v1/messages/count_tokens", "/apply-template"),
    *("/v1/chat/completions/input_tokens", "/tokenize", "/detokenize", "/api/show"),
)
NAME_A_MODEL = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", MODERATIONS),
    *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    *("/infill", "/completion", "/completions"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    *COUNTED,
)
