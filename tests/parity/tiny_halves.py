"""More configs for ``tiny_configs``: experts beside a shared one, and layers of one half each."""

from __future__ import annotations

from typing import Any

BY_HALVES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-moe-shared": (
        "GraniteMoeShared",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 80,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
            "attention_multiplier": 0.3,
        },
    ),
}
