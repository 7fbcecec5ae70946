"""Tiny random models of every family, made and answered by transformers in float32.

The vocabulary is small enough that the engine can report the whole distribution at each position.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from tests.parity.tiny_configs import CONFIGS, NEWER, SIZES, TEXT_CONFIGS, VOCAB
from tests.parity.tiny_encoders import ENCODERS

NOT_HERE = "transformers and torch are not installed: make test-parity has them"
torch = pytest.importorskip("torch", reason=NOT_HERE)
transformers = pytest.importorskip("transformers", reason=NOT_HERE)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

NUM_TOKENS = 24
ALL = CONFIGS | NEWER | ENCODERS


@dataclass(frozen=True)
class Answer:
    """What transformers says to one prompt.

    ``logprobs`` is ``[prompt + answer - 1, vocabulary]``, row ``i`` after the first ``i + 1``
    tokens; ``margins`` has the top-2 difference in logits at each generated token.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    margins: list[float]
    logprobs: np.ndarray


def make_model(name: str, **more: Any) -> Any:
    """Return a model by name, of ALL, every parameter random, norms and biases too.

    ``more`` changes its config.
    """
    config = make_config(name, **more)
    return randomised(getattr(transformers, class_name(name))(config), seed=len(name))


def class_name(name: str) -> str:
    """Return the name of transformers' class of a model by name."""
    family, _ = ALL[name]
    if name in ENCODERS:
        return family
    return family + ("LMHeadModel" if family == "GPT2" else "ForCausalLM")


def make_config(name: str, **more: Any) -> Any:
    """Return the config of a model by name; ``more`` changes it."""
    family, changes = ALL[name]
    family = family.removesuffix("Model").removesuffix("ForSequenceClassification")
    kind = f"{family}TextConfig" if family in TEXT_CONFIGS else f"{family}Config"
    known = getattr(transformers, kind)
    wanted: dict[str, Any] = {}
    for key, value in (SIZES | changes | more).items():
        if key not in (*changes.get("unused", ()), "unused"):
            # Under the family's own name, so that a later value stands in place of an earlier.
            wanted[known.attribute_map.get(key, key)] = value
    return known(**deepcopy(wanted))  # some write into what they are given


def randomised(model: Any, *, seed: int) -> Any:
    """Return the model in float32, every parameter random."""
    model = model.float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter.copy_(parameter + 0.3 * noise)  # begins with 1, or 0 if 1 is added
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * noise)
            elif parameter.ndim == 3:  # a stack of experts
                parameter.copy_(noise * 1.5 / parameter.shape[2] ** 0.5)
            else:  # large enough that attention is sharp and logits are far from flat
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):  # learnt, though it is no parameter
                buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
            elif buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def save(model: Any, directory: Path, **options: Any) -> Path:
    """Write ``model`` with a tokenizer.json of one word for each id; return ``directory``."""
    model.save_pretrained(directory, **options)
    small_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def small_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of VOCAB words that no text spells."""
    tokenizer = Tokenizer(models.BPE({f"w{i}": i for i in range(VOCAB)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def prompts(*lengths: int) -> list[list[int]]:
    """Return reproducible random prompts of these lengths in tokens."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


def answer(model: Any, prompt_ids: list[int]) -> Answer:
    """Continue greedily, each step from the whole text, so that no cache can hide a mistake."""
    ids, margins = list(prompt_ids), []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits_TV = model(torch.tensor([ids]), use_cache=False).logits[0]
            best, second = logits_TV[-1].topk(2).values.tolist()
            margins.append(best - second)
            ids.append(int(logits_TV[-1].argmax()))
        logprobs = logits_TV.log_softmax(-1).numpy()
    return Answer(prompt_ids, ids[len(prompt_ids) :], margins, logprobs)
