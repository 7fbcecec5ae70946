"""Values of a config.json, read with type and range checked, and which of them were read.

A config comes from a stranger. A field that was not read and that by its name says a size is
refused, so that no count is of another model than the one in the file. It opens no file.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

_MAX_INTEGER = 2**31 - 1
_MAX_COUNT = 4096
_MAX_LENGTH = 1024  # of a list: it says something of each layer

# Words in the names of fields that say how much of something there is.
_SIZE = re.compile(
    r"(?:^|_)(?:num|n|dim|dims|size|width|rank|layers?|heads?|experts?|intermediate|hidden|kv|cache|"
    r"bias|conv|state|ssm|mamba\d?|shared|window|embd|embeds|lora|mtp|nextn|adapter|vision|audio|"
    r"qk_norm|image|video|speech|encoder|decoder|tower|index|memory|block|blocks|latent|ffn|d|inner)(?:_|$)"
)
# Fields with such names that change no byte of weights or cache, as all known families use them.
_HARMLESS = re.compile(
    r"(?:.*_(?:token_id|token_ids|token_index|dropout|pdrop|eps|epsilon|coef|alpha|theta|act|scale|"
    r"multipliers?|limit|scalar|prob|method|func|factor|implementation|loss|map|scaling|norm_eps)"
    r"|rope_.*|output_.*|initializer_.*|use_cache|num_beams?.*|num_return_sequences|num_labels"
    r"|no_repeat_ngram_size|encoder_no_repeat_ngram_size|chunk_size_feed_forward|cross_attention.*"
    r"|is_encoder_decoder|is_decoder|add_cross_attention|tie_encoder_decoder|decoder_start_token_id"
    r"|original_max_position_embeddings|initial_context_length|max_window_layers|n_group|topk_group"
    r"|ep_size|num_hidden_layers_.*|cache_implementation|router_.*|norm_topk_prob|seq_aux|aux_.*"
    r"|time_step_.*|mamba_dt_.*|mamba_ssm_dtype|mamba_chunk_size|chunk_size|use_mamba_kernels"
    r"|use_mambapy|layernorm_.*|residual_in_fp32|rescale_.*|num_logits_to_keep|calc_logits_.*"
    r"|embd_pdrop|_.*|transformers_.*|pretraining_tp|pruned_heads|num_assistant_tokens"
    r"|mixer_rms_eps|layer_norm_eps|layer_norm_epsilon|hidden_act|hidden_activation|hidden_dropout.*"
    r"|special_.*|summary_.*|problem_type|bad_words_ids|id2label|label2id|prefix|task_specific_params"
    r"|no_rope_.*|rotary_(?:dim|pct|ndims|emb_base)|first_k_dense_layers"
    r"|attn_temperature_tuning|floor_scale|for_llm_compressor)"
)


class Fields:
    """A mapping of a stranger's values with typed access; it remembers what was read.

    A key that is absent or null gives the default; without a default it is an error. Several names
    are names that different families give to the same thing.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self._read: set[str] = set()

    def fail(self, problem: str) -> NoReturn:
        """Raise ValueError with the file's name in front of ``problem``."""
        raise ValueError(f"{self.where}: {problem}")

    def get(self, *names: str) -> Any:
        """Return the first value that is there and not null, as it is; None if there is none."""
        self._read.update(names)
        return next((v for name in names if (v := self.values.get(name)) is not None), None)

    def has(self, *names: str) -> bool:
        """Return whether one of these is there, and neither null, false, 0 nor empty."""
        return bool(self.get(*names))

    def integer(self, *names: str, default: int | None = None, low: int = 1) -> int:
        """Return an integer of at least ``low`` that a 32-bit size can hold."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if value is None:
            self.fail(f"{' or '.join(names)} is missing")
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= _MAX_INTEGER:
            self._refuse(names, value, f"an integer from {low} to {_MAX_INTEGER}")
        return value

    def flag(self, *names: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(*names)
        if value is None:
            return default
        if type(value) is not bool:
            self._refuse(names, value, "true or false")
        return value

    def text(self, *names: str, default: str = "") -> str:
        """Return a string."""
        value = self.get(*names)
        if value is None:
            return default
        if type(value) is not str:
            self._refuse(names, value, "a string")
        return value

    def count(self, *names: str, default: int | None = None, low: int = 1) -> int:
        """Return how many there are of something that is made one by one, as layers are."""
        value = self.integer(*names, default=default, low=low)
        if value > _MAX_COUNT:
            self.fail(f"{names[0]} is {value}, more than {_MAX_COUNT}")
        return value

    def list_of(self, kind: type, *names: str, length: int | None = None) -> list[Any] | None:
        """Return a list whose elements are all of one kind; None where there is none."""
        value = self.get(*names)
        if value is None:
            return None
        wanted = f"a list of {'' if length is None else f'{length} '}{kind.__name__}"
        if type(value) is not list or any(type(v) is not kind for v in value):
            self._refuse(names, value, wanted)
        if len(value) > _MAX_LENGTH:
            self.fail(f"{names[0]} has {len(value)} elements, more than {_MAX_LENGTH}")
        if length is not None and len(value) != length:
            self.fail(f"{names[0]} has {len(value)} elements, wanted {wanted}")
        return value

    def unread(self) -> dict[str, Any]:
        """Return the values that were not read so far."""
        return {key: value for key, value in self.values.items() if key not in self._read}

    def not_understood(self) -> list[str]:
        """Return the fields that were not read and that by their name and value say a size."""
        return [
            key
            for key, value in self.unread().items()
            if value not in (None, False, 0, "", [], {})
            and _SIZE.search(key)
            and not _HARMLESS.fullmatch(key)
        ]

    def _refuse(self, names: tuple[str, ...], value: Any, wanted: str) -> NoReturn:
        name = next(name for name in names if self.values.get(name) is not None)
        self.fail(f"{name} is {reprlib.repr(value)}, not {wanted}")
