"""Turn a llama2.c model (``.bin`` and ``tokenizer.bin``) into a GGUF file.

The small story models exist only in that format, which the engine has no reason to read.
Also a program: ``python tests/llama2c.py MODEL.bin TOKENIZER.bin OUT.gguf``.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import gguf
import numpy as np

NORM_EPS = 1e-5
HEADER = struct.Struct("<7i")
UNKNOWN, BOS, EOS, FIRST_BYTE, FIRST_PIECE = 0, 1, 2, 3, 259


def convert(bin_path: Path, tokenizer_path: Path, out: Path) -> None:
    """Write ``out``: the same float32 weights, and a SentencePiece vocabulary with its scores.

    llama2.c rotates neighbouring channels, as GGUF files of this architecture do, so q and k keep
    their order.
    """
    with bin_path.open("rb") as file:
        fields = HEADER.unpack(file.read(HEADER.size))
        weights = np.fromfile(file, np.float32)
    dim, hidden, layers, heads, kv_heads, signed_vocab, context = fields
    vocab, head_dim = abs(signed_vocab), dim // heads  # negative: the output head is not shared
    kv_dim = kv_heads * head_dim
    taken = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal taken
        start, taken = taken, taken + int(np.prod(shape))
        return weights[start:taken].reshape(shape)

    tensors = {"token_embd": take(vocab, dim)}
    for name, shape in [
        ("attn_norm", (dim,)),
        ("attn_q", (dim, dim)),
        ("attn_k", (kv_dim, dim)),
        ("attn_v", (kv_dim, dim)),
        ("attn_output", (dim, dim)),
        ("ffn_norm", (dim,)),
        ("ffn_gate", (hidden, dim)),
        ("ffn_down", (dim, hidden)),
        ("ffn_up", (hidden, dim)),
    ]:
        tensors |= {f"blk.{i}.{name}": matrix for i, matrix in enumerate(take(layers, *shape))}
    tensors["output_norm"] = take(dim)
    take(2, context, head_dim // 2)  # cosines and sines, which every reader computes itself
    if signed_vocab < 0:
        tensors["output"] = take(vocab, dim)
    if taken != weights.size:
        raise ValueError(f"{bin_path}: {weights.size} floats where the header announces {taken}")

    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(dim)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    _add_vocabulary(writer, tokenizer_path, vocab)
    for name, array in tensors.items():
        writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, path: Path, size: int) -> None:
    data, at = path.read_bytes(), 4  # the first number is the longest piece's length
    pieces, scores, kinds = [], [], []
    for token in range(size):
        score, length = struct.unpack_from("<fi", data, at)
        at += 8 + length
        piece = data[at - length : at].decode().replace(" ", "▁")
        kind = gguf.TokenType.NORMAL
        if token == UNKNOWN:
            kind = gguf.TokenType.UNKNOWN
        elif token in (BOS, EOS):
            piece, kind = piece.strip(), gguf.TokenType.CONTROL
        elif FIRST_BYTE <= token < FIRST_PIECE:
            piece, kind = f"<0x{token - FIRST_BYTE:02X}>", gguf.TokenType.BYTE  # spelt so or raw
        pieces.append(piece)
        scores.append(score)
        kinds.append(kind)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_add_bos_token(True)


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:4]))
