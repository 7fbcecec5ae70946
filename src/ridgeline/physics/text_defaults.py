"""What configs of models that also see leave out of their text half, by its ``model_type``.

Transformers writes only what differs from the defaults of a class into such a half.
"""

from __future__ import annotations

from collections.abc import Mapping

TEXT_DEFAULTS: Mapping[str, Mapping[str, int | float]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "ministral3": {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 0},
}
