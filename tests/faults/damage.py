"""Files as strangers and bad disks make them: values of a format changed, then its bytes."""

from __future__ import annotations

import copy
import json
import marshal
import struct
from random import Random
from typing import Any, NamedTuple

INTS = (0, 1, 2, 3, 7, 31, 64, 255, 256, 1000, 65536, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**53)
MORE_INTS = (*INTS, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, -1.0, 0.5, 1e-300, 1e30, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", "x", "\0", "a" * 20_000, "\ud800", "\n" * 1000, "../../x", "%s%n", "\u202e\ufffe\uffff",
    "{{ 1/0 }}", "{% for", "<|im_end|>", "llama", "gpt2", "bert", "t5", "gemma2", "qwen2", "yarn",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 10**30, *INTS, *FLOATS, *TEXTS, [], [[]], [1] * 1000, {}, {"a": 1},
    {"type": "Sequence"}, {"rope_type": "yarn", "factor": -1}, {"quant_method": "gptq", "bits": 4},
)  # fmt: skip


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return what holds each part of a value, with its key there; of a list the first items."""
    if isinstance(value, dict):
        found: list[tuple[Any, Any]] = [(value, key) for key in value]
    elif isinstance(value, list):
        found = [(value, index) for index in range(min(len(value), 40))]
    else:
        return []
    for holder, key in tuple(found):
        if isinstance(holder[key], dict | list):
            found += _places(holder[key])
    return found


def _copied(value: Any) -> Any:
    """Return a copy of what JSON can say, a dozen times sooner than ``copy.deepcopy``."""
    return marshal.loads(marshal.dumps(value))


def damaged_value(value: Any, rng: Random, keys: tuple[str, ...] = ()) -> Any:
    """Return a copy with a few places changed; ``keys`` may be added to an object."""
    value = _copied(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if keys and isinstance(value, dict) and rng.random() < 0.3:
            value[rng.choice(keys)] = rng.choice(VALUES)
            continue
        places = _places(value)
        if not places:
            return rng.choice(VALUES)
        inner, last = rng.choice(places)
        what = rng.randrange(6)
        if what == 0:
            del inner[last]
        elif what == 1 and isinstance(inner, list):
            inner.insert(last, _copied(rng.choice(inner)))
        elif what == 2 and isinstance(inner, dict):
            inner[f"{last}2"] = inner[last]
        elif what == 3 and type(inner[last]) in (int, float):
            inner[last] += rng.choice((-1, 1, 1000))
        else:
            inner[last] = _copied(rng.choice(VALUES))
    return value


def as_json(value: Any, rng: Random) -> bytes:
    """Return JSON, once in a while broken."""
    text = json.dumps(value)
    what = rng.randrange(40)
    if what == 0:
        text = text[: rng.randrange(len(text) + 1)]
    elif what == 1:
        text = "[" * 100_000
    elif what == 2:
        text = '{"a":' * 50_000 + "1" + "}" * 50_000
    elif what == 3:
        text = "\ufeff" + text
    elif what == 4:
        return text.encode("utf-16")
    elif what == 5:
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice('{}[]",:0\\\0') + text[place:]
    elif what == 6:
        text = text.replace("1", "1" * 5000, 1)
    elif what == 7:
        text = text.replace('"', "'")
    return text.encode("utf-8", "surrogatepass")


def damaged_bytes(data: bytes, rng: Random) -> bytes:
    """Return a file that was cut, whose bits or blocks changed, or that is longer."""
    what = rng.randrange(6)
    if not data or what == 0:
        return data[: rng.randrange(len(data) + 1)]
    if what == 1:
        begin = rng.randrange(len(data))
        length = min(rng.choice((1, 512, 4096, 1 << 20)), len(data) - begin)
        return data[:begin] + bytes(length) + data[begin + length :]
    if what == 2:
        return data + rng.randbytes(rng.choice((1, 8, 4096)))
    changed = bytearray(data)
    reach = len(data) if what < 5 else min(len(data), 4096)
    for _ in range(rng.choice((1, 4, 40))):
        changed[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def damaged_safetensors(data: bytes, rng: Random) -> bytes:
    """Return a file with a changed header, or one whose length or data do not fit it."""
    size = struct.unpack_from("<Q", data)[0]
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    for _ in range(rng.choice((0, 1, 1, 2))):
        entry = header[rng.choice([*header])] if isinstance(header, dict) and header else None
        if isinstance(entry, dict) and rng.random() < 0.6:
            entry[rng.choice(("dtype", "shape", "data_offsets"))] = rng.choice(
                ("F16", "F8_E4M3", "I64", "BOOL", "F4", [2**63, 2**63], [0, 2**40], [-1, 5], [0],
                 [], [1.5, 2], [0, 0], [2**31, 1], None, "F32", 5)
            )  # fmt: skip
        else:
            header = damaged_value(header, rng)
    text = as_json(header, rng)
    length = rng.choice(MORE_INTS) if rng.random() < 0.1 else len(text)
    whole = struct.pack("<Q", length) + text + rest
    return damaged_bytes(whole, rng) if rng.random() < 0.2 else whole


# --- GGUF ------------------------------------------------------------------------------------

_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
            11: "<q", 12: "<d"}  # fmt: skip
_TEXT, _ARRAY = 8, 9


class Gguf(NamedTuple):
    """The parts of a file: [key, type, value] and [name, dimensions, type, offset], each a list."""

    pairs: list[list[Any]]
    tensors: list[list[Any]]
    data: bytes


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 4

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.place)
        self.place += struct.calcsize(form)
        return value

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            length = self.number("<Q")
            self.place += length
            return self.data[self.place - length : self.place]
        if kind == _ARRAY:
            of_items = self.number("<I")
            return [of_items, [self.value(of_items) for _ in range(self.number("<Q"))]]
        return self.number(_FORMATS[kind])


def parsed_gguf(data: bytes) -> Gguf:
    """Return the parts of a file that is whole."""
    reader = _Reader(data)
    reader.number("<I")
    num_tensors, num_pairs = reader.number("<Q"), reader.number("<Q")
    pairs = []
    for _ in range(num_pairs):
        key, kind = reader.value(_TEXT), reader.number("<I")
        pairs.append([key, kind, reader.value(kind)])
    tensors = []
    for _ in range(num_tensors):
        name = reader.value(_TEXT)
        dimensions = [reader.number("<Q") for _ in range(reader.number("<I"))]
        tensors.append([name, dimensions, reader.number("<I"), reader.number("<Q")])
    return Gguf(pairs, tensors, data[-(-reader.place // 32) * 32 :])


def _packed(form: str, value: Any) -> bytes:
    try:
        return struct.pack(form, value)
    except (struct.error, OverflowError, TypeError):
        return bytes(struct.calcsize(form))


def _written(kind: int, value: Any, rng: Random) -> bytes:
    if kind == _TEXT:
        text = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        length = rng.choice(MORE_INTS) if rng.random() < 1e-4 else len(text)
        return _packed("<Q", length) + text
    if kind == _ARRAY:
        of_items, items = value if isinstance(value, list) and len(value) == 2 else (4, [1])
        items = items if isinstance(items, list) else [items]
        length = rng.choice(MORE_INTS) if rng.random() < 0.003 else len(items)
        body = b"".join(_written(of_items, one, rng) for one in items)
        return _packed("<I", of_items) + _packed("<Q", length) + body
    return _packed(_FORMATS.get(kind, "<I"), value)


def _damaged_item(kind: int, value: Any, rng: Random) -> Any:
    if kind == _ARRAY and isinstance(value, list):
        of_items, items = value[0], list(value[1])
        what = rng.randrange(6)
        if what == 0:
            items = items[: rng.randrange(len(items) + 1)]
        elif what == 1:
            items += items
        elif what == 2:
            of_items = rng.choice((0, 1, 4, 6, 7, 8, 9, 10, 12, 13, 99))
        elif what == 3:
            rng.shuffle(items)
        else:
            for _ in range(rng.choice((1, 3, 10)) if items else 0):
                place = rng.randrange(len(items))
                items[place] = _damaged_item(of_items, items[place], rng)
        return [of_items, items]
    if kind == _TEXT and isinstance(value, bytes | str):
        return rng.choice((*TEXTS, b"\xff\xfe", b"\xed\xa0\x80", str(value) + "x", value[:1]))
    return rng.choice(FLOATS if kind in (6, 12) else (*MORE_INTS, -1, -(2**31)))


_KEYS = (
    b"general.alignment", b"tokenizer.chat_template", b"tokenizer.ggml.pre",
    b"tokenizer.ggml.precompiled_charsmap", b"tokenizer.ggml.add_bos_token",
    b"general.quantization_version", b"llama.attention.key_length",
    b"llama.rope.scaling.type", b"llama.rope.scaling.factor",
    b"llama.expert_count", b"llama.vocab_size", b"llama.rope.dimension_count", b"split.count",
    b"qwen2.attention.sliding_window", b"tokenizer.ggml.unknown_token_id",
)  # fmt: skip


def damaged_gguf(data: bytes, rng: Random) -> bytes:
    """Return a file with changed keys, tensors, counts or bytes."""
    pairs, tensors, content = parsed_gguf(data)
    counts = [len(tensors), len(pairs)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        what = rng.randrange(12)
        pair, tensor = rng.choice(pairs), rng.choice(tensors)
        if what < 5:
            pair[2] = _damaged_item(pair[1], pair[2], rng)
        elif what == 5:
            pair[1] = rng.choice((*_FORMATS, _TEXT, _ARRAY, 13, 99))
        elif what == 6:
            added = [rng.choice(_KEYS), *rng.choice(((4, 2), (6, 1.0), (8, b"linear"), (7, True)))]
            pairs.append(added if rng.random() < 0.6 else copy.deepcopy(pair))
        elif what == 7 and len(pairs) > 1:
            pairs.remove(pair)
        elif what == 8:
            tensor[1] = rng.choice(
                (tensor[1][::-1], [*tensor[1], 1], [], [rng.choice(MORE_INTS)], [1] * 5,
                 [rng.choice(MORE_INTS)] * 2, tensor[1][:1])
            )  # fmt: skip
        elif what == 9:
            tensor[rng.choice((2, 3))] = rng.choice((*range(40), tensor[3] + 32, *MORE_INTS))
        elif what == 10:
            other = rng.choice(tensors)[0]
            tensor[0] = rng.choice(
                (other, b"rope_freqs.weight", b"blk.99.attn_q.weight", b"", other * 20)
            )
        elif len(tensors) > 1:
            tensors.remove(tensor)
    if rng.random() > 0.05:
        counts = [len(tensors), len(pairs)]
    if rng.random() < 0.05:
        counts[rng.randrange(2)] = rng.choice(MORE_INTS)
    head = (
        b"GGUF"
        + _packed("<I", rng.choice((3,) * 30 + (0, 1, 2, 4)))
        + _packed("<QQ"[:2], counts[0])
    )
    head += _packed("<Q", counts[1])
    for key, kind, value in pairs:
        head += _written(_TEXT, key, rng) + _packed("<I", kind) + _written(kind, value, rng)
    for name, dimensions, kind, offset in tensors:
        head += _written(_TEXT, name, rng) + _packed("<I", len(dimensions))
        head += b"".join(_packed("<Q", one) for one in dimensions)
        head += _packed("<I", kind) + _packed("<Q", offset)
    whole = head + bytes(-len(head) % 32) + content
    return damaged_bytes(whole, rng) if rng.random() < 0.2 else whole
