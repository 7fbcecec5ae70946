"""Record what Hugging Face transformers answers, in float32, for a model in a GGUF file.

Independent of the engine on purpose: the file is read with the gguf package, the vocabulary is
rebuilt here, and transformers computes with eager attention, one prompt at a time. Run it in the
environment of ``make test-parity``::

    python tools/record_reference.py MODEL.gguf tests/data/reference/NAME.json
    python tools/record_reference.py STORIES.gguf OUT.json --source stories15M.bin

(a llama2.c model is first converted by ``tests/llama2c.py``). Each prompt gets 64 greedy tokens,
whether or not one of them ends the text, the logit margin between the two best candidates at each,
and the five likeliest first tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import jinja2
import numpy as np
import torch
import transformers  # type: ignore[import-not-found]
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

NUM_TOKENS = 64
PROMPTS = Path(__file__).parent / "reference_prompts.json"
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


def transformers_name(name: str) -> str:
    """Return what transformers calls the GGUF tensor ``name``."""
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", name):
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}"
    return OTHER_NAMES[name]


def halves_together(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order of llama GGUF files, where channels rotated together are neighbours."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def load_model(reader: gguf.GGUFReader, meta: dict[str, Any]) -> Any:
    """Return the transformers model with every weight decoded to float32."""
    family = meta["general.architecture"]
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }
    config_class, model_class = kinds[family]
    heads = meta[f"{family}.attention.head_count"]
    kv_heads = meta[f"{family}.attention.head_count_kv"]
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        shape = tuple(reversed(tensor.shape.tolist()))
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if family == "llama" and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            array = halves_together(array, heads if "attn_q" in tensor.name else kv_heads)
        state[transformers_name(tensor.name)] = torch.from_numpy(np.array(array))
    config = config_class(
        vocab_size=len(state["model.embed_tokens.weight"]),
        hidden_size=meta[f"{family}.embedding_length"],
        intermediate_size=meta[f"{family}.feed_forward_length"],
        num_hidden_layers=meta[f"{family}.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=meta[f"{family}.context_length"],
        rms_norm_eps=meta[f"{family}.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta[f"{family}.rope.freq_base"]},
        tie_word_embeddings="lm_head.weight" not in state,
        attn_implementation="eager",
    )
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = model_class(config)
    model.to_empty(device="cpu")
    model.load_state_dict(state, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer is in no state dict
    return model.float().eval()


def byte_level_vocabulary(meta: dict[str, Any]) -> tuple[Encode, Decode]:
    """Return encode and decode of a byte-level BPE vocabulary."""
    pieces = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if meta["tokenizer.ggml.pre"] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        words: Any = pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    elif meta["tokenizer.ggml.pre"] == "smollm":
        words = pre_tokenizers.Digits(individual_digits=True)
    else:
        raise ValueError(f"pre-tokenizer {meta['tokenizer.ggml.pre']!r} is not known here")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    kinds = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(piece, normalized=False)
            for piece, kind in zip(pieces, kinds, strict=True)
            if kind in special
        ]
    )
    return (
        lambda text: list(tokenizer.encode(text).ids),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
    )


def sentencepiece_vocabulary(meta: dict[str, Any]) -> tuple[Encode, Decode]:
    """Return encode (the begin token in front) and decode of a SentencePiece BPE vocabulary."""
    pieces, scores = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    control = [
        piece
        for piece, kind in zip(pieces, meta["tokenizer.ggml.token_type"], strict=True)
        if kind == gguf.TokenType.CONTROL
    ]
    splitter = re.compile("(" + "|".join(map(re.escape, control)) + ")")

    def encode_plain(text: str) -> list[int]:
        symbols = list("▁" + text.replace(" ", "▁"))
        while True:  # merge the best-scored pair, the leftmost of equals, until none is a piece
            pairs = ((ids.get(a + b), i) for i, (a, b) in enumerate(pairwise(symbols)))
            best = max(((scores[t], -i) for t, i in pairs if t is not None), default=None)
            if best is None:
                break
            at = -best[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        out: list[int] = []
        for symbol in symbols:
            known = [ids[symbol]] if symbol in ids else []
            out += known or [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return out

    def encode(text: str) -> list[int]:
        out = [meta["tokenizer.ggml.bos_token_id"]]
        for part in filter(None, splitter.split(text)):
            out += [ids[part]] if part in control else encode_plain(part)
        return out

    def decode(tokens: list[int]) -> str:
        raw = b""
        for piece in (pieces[token] for token in tokens):
            byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
            raw += bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
        return raw.decode(errors="replace")

    return encode, decode


def prompt_texts(meta: dict[str, Any]) -> list[str]:
    """Return the texts to complete, with the chats written out by the model's own template."""
    prompts = json.loads(PROMPTS.read_text())
    texts: list[str] = prompts["texts"]
    if source := meta.get("tokenizer.chat_template"):
        pieces = meta["tokenizer.ggml.tokens"]
        template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
        texts += [
            template.render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=pieces[meta["tokenizer.ggml.bos_token_id"]],
                eos_token=pieces[meta["tokenizer.ggml.eos_token_id"]],
            )
            for messages in prompts["chats"]
        ]
    return texts


@torch.inference_mode()  # type: ignore[untyped-decorator]
def complete(model: Any, prompt_ids: list[int]) -> dict[str, Any]:
    """Return the greedy continuation of one prompt, its margins, and the first top five."""
    tokens, cache = torch.tensor([prompt_ids]), None
    output_ids: list[int] = []
    margins: list[float] = []
    for _ in range(NUM_TOKENS):
        out = model(tokens, past_key_values=cache, use_cache=True)
        cache, logits_V = out.past_key_values, out.logits[0, -1]
        best, second = logits_V.topk(2).values.tolist()
        if not output_ids:
            logprobs, ids = logits_V.log_softmax(-1).topk(5)
            top5 = [[i, round(p, 5)] for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True)]
        margins.append(round(best - second, 4))
        output_ids.append(int(logits_V.argmax()))
        tokens = torch.tensor([output_ids[-1:]])
    return {"prompt_ids": prompt_ids, "output_ids": output_ids, "margins": margins, "top5": top5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("--source", type=Path, help="the file that MODEL was converted from")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation, so that a second run gives the same file
    reader = gguf.GGUFReader(args.model)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    is_byte_level = meta["tokenizer.ggml.model"] == "gpt2"
    encode, decode = (byte_level_vocabulary if is_byte_level else sentencepiece_vocabulary)(meta)
    model = load_model(reader, meta)
    source = args.source or args.model
    header = {
        "model": source.name,
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "command": f"python tools/record_reference.py {args.model.name} {args.out.name}"
        + (f" --source {args.source.name}" if args.source else ""),
    }
    lines = []
    for text in prompt_texts(meta):
        if not (prompt_ids := encode(text)):
            continue  # an empty text without a begin token is no prompt
        answer = complete(model, prompt_ids)
        row = {"text": text, "output": decode(answer["output_ids"]), **answer}
        lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")))
        print(f"{len(lines):3} {len(prompt_ids):4} tokens  {row['output'][:60]!r}", flush=True)
    body = ",\n".join(lines)
    args.out.write_text(f'{{"header":{json.dumps(header)},\n"prompts":[\n{body}\n]}}\n')


if __name__ == "__main__":
    main()
