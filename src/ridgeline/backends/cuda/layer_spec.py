"""What the kernels need to know of a layer's heads, and which models the backend refuses.

It imports no torch, so that a model can be refused on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.model.shape.cache_groups import CacheGroup
from ridgeline.model.shape.model import Attention, Layer, ModelArch
from ridgeline.model.shape.recurrent import Ssm

MAX_HEAD_DIM = 512
MANY_CHANNELS = 256  # channels of a value above which programs have few rows
MAX_LATENT = 512  # channels of a latent, which is key and value of many heads
MAX_SHARED_HEADS = 64  # query heads of one key head: the rows of a program


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How a layer makes and attends its heads.

    Attributes:
        H: query heads.
        K: key and value heads.
        D: channels of a head.
        half: pairs of channels that turn.
        scale: of the products of queries and keys.
        window: how many last tokens a token sees; 0 for all.
        softcap: of scores; 0 for none.
        qk_norm: RMS norm of each query and key head: 0 for none, 1 before they turn, 2 behind.
        v_norm: RMS norm of each value head.
        v_is_k: values are the products for keys.
        own: the layer has keys and values of its own.
        eps: of these norms.
        value_at: the channel of a key at which its value begins, of latent attention; 0 where
            values are apart.
    """

    H: int
    K: int
    D: int
    half: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    qk_norm: int = 0
    v_norm: bool = False
    v_is_k: bool = False
    own: bool = True
    eps: float = 1e-5
    value_at: int = 0

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.D - self.value_at

    @property
    def is_wide(self) -> bool:
        """Whether values are too wide for programs of many rows, as latents are."""
        return self.value_at > 0 or self.D > MANY_CHANNELS

    @property
    def shared(self) -> int:
        """Query heads of a key head that a program attends together."""
        return shared_heads(self.H // self.K, 16 if self.is_wide else MAX_SHARED_HEADS)


def shared_heads(heads: int, most: int) -> int:
    """Return how many query heads of a key head a program has: equal parts, ``most`` at most."""
    return next(n for n in range(min(heads, most), 0, -1) if heads % n == 0)


def head_spec(mixer: Attention, eps: float) -> HeadSpec:
    """Return the spec of a layer's attention; ``eps`` is that of the model's norms."""
    if mixer.latent is not None:
        return HeadSpec(
            H=mixer.num_heads,
            K=1,
            D=mixer.key_dim,
            half=mixer.rope_dim // 2,
            scale=mixer.score_scale,
            window=mixer.window or 0,
            value_at=mixer.rope_dim,
        )
    of_heads = (2 if mixer.norm_turned else 1) if mixer.qk_norm == "head" else 0
    return HeadSpec(
        H=mixer.num_heads,
        K=mixer.num_kv_heads,
        D=mixer.head_dim,
        half=mixer.rope_dim // 2,
        scale=mixer.score_scale,
        window=mixer.window or 0,
        softcap=mixer.softcap,
        qk_norm=of_heads,
        v_norm=mixer.v_norm,
        v_is_k=mixer.v_is_k,
        own=mixer.kv_of is None,
        eps=eps,
    )


def missing(arch: ModelArch) -> str | None:
    """Return in words what of a model this backend cannot compute; None if it can compute all."""
    if arch.is_encoder or arch.reads_whole or arch.scores:
        return "models that read texts whole (encoders)"
    return next(filter(None, map(_missing_of, arch.layers)), None)


def runs_ahead(arch: ModelArch) -> bool:
    """Whether steps run ahead. They do not with states, which an unused step would change."""
    return all(layer.recurrent is None for layer in arch.layers)


def _missing_of(layer: Layer) -> str | None:
    mixer = layer.attention
    if isinstance(layer.recurrent, Ssm) and layer.recurrent.step_rank:
        return "the first Mamba"
    if mixer is None:
        return None
    if mixer.latent is not None and (mixer.value_dim > MAX_LATENT or not mixer.rope_dim):
        return (
            f"latents of {mixer.value_dim} channels (at most {MAX_LATENT}, beside some that turn)"
        )
    if mixer.latent is None and mixer.head_dim > MAX_HEAD_DIM:
        return f"heads of {mixer.head_dim} channels (at most {MAX_HEAD_DIM})"
    grows = mixer.rope is not None and mixer.rope.query_growth
    if mixer.norm_turned and (mixer.qk_norm == "width" or grows):
        return "queries that are normed behind rope and changed once more (Llama 4)"
    return None


def values_per_token(arch: ModelArch, groups: tuple[CacheGroup, ...]) -> int:
    """Return how many values a token has in a block, in the group that has most."""
    mixers = {i: arch.layers[i].known_attention for i in arch.cached_layers}
    return max(sum(mixers[i].cache_size for i in group.layers) for group in groups)
