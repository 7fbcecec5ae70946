"""Multi-head latent attention (DeepSeek-V2, 2024) as structural facts.

A token's keys and values of all heads are products of one vector, the latent, and a few channels
that turn with its position. Only these are kept. What would make keys of a latent is multiplied
into queries instead, and what would make values into the sum of latents that a query sees (the
paper's "absorbed" form): attention is then that of many query heads and one key head, whose values
are part of the keys. It holds no tensors and knows nothing of heads that share nothing: see
``model.shape``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latent:
    """The compressed parts of attention.

    Attributes:
        q_rank: channels that a row is compressed to before queries are made of it; 0 where queries
            are made of the row itself.
        kv_rank: channels of the latent.
        nope_dim: channels of a query head that do not turn.
        v_dim: channels of a head's value.
        norm_eps: of the norms of what is compressed, whatever that of the model is.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    v_dim: int
    norm_eps: float = 1e-6

    @property
    def projections(self) -> tuple[str, ...]:
        """Canonical names of the matrices that read the layer's input."""
        return ("q_a" if self.q_rank else "q", "kv_a")

    def shapes(self, hidden_size: int, num_heads: int, rope_dim: int) -> dict[str, tuple[int, ...]]:
        """Return canonical name and shape of each tensor; heads stand one below the other.

        Of a query head, and of "kv_a", the ``rope_dim`` channels that turn come first. A head's
        part of "k_b" is ``[nope_dim, kv_rank]``, of "v_b" ``[v_dim, kv_rank]``.
        """
        q_rows = num_heads * (rope_dim + self.nope_dim)
        queries: dict[str, tuple[int, ...]] = {"q": (q_rows, hidden_size)}
        if self.q_rank:
            queries = {
                "q_a": (self.q_rank, hidden_size),
                "q_a_norm": (self.q_rank,),
                "q_b": (q_rows, self.q_rank),
            }
        return queries | {
            "kv_a": (rope_dim + self.kv_rank, hidden_size),
            "kv_a_norm": (self.kv_rank,),
            "k_b": (num_heads * self.nope_dim, self.kv_rank),
            "v_b": (num_heads * self.v_dim, self.kv_rank),
            "o": (hidden_size, num_heads * self.v_dim),
        }
