"""The kinds of files that are read: how a good one is made, damaged by a number, and used.

They are used as the program uses them; what comes of it ``tests.faults.files`` judges.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import typer

from ridgeline import LLM, SamplingParams
from ridgeline.backends.cpu.kernels.compile import _read_cached
from ridgeline.backends.cpu.layout import model_weights
from ridgeline.backends.cpu.layout.model_weights import load_weights, model_sizes
from ridgeline.cli.commands.explain import explain_command
from ridgeline.cli.commands.replay import decide_again, serve_again
from ridgeline.engine.calibration import save_calibration, stored_calibrations
from ridgeline.engine.setup.options import Options
from ridgeline.foresight.step_time.fit import PredictionMonitor
from ridgeline.model.files.identity import digests as contents
from ridgeline.model.files.identity.digests import FileDigests
from ridgeline.model.hub.local_models import ModelStores
from ridgeline.model.hub.search import NotPulledError, find_model
from ridgeline.text.template.chat import ChatTemplate
from tests import lora
from tests.engine.kv_disk import test_segments
from tests.engine.test_llm import HELLO, write_model
from tests.faults import damage
from tests.foresight.runs import recorded
from tests.foresight.step_time.test_prediction_monitor import heard, known, served
from tests.model.files import tiny
from tests.model.files.encoders import write_encoder
from tests.tiny import PLAIN, checkpoint

_SMALL: dict[str, Any] = {"backend": "reference", "kv_cache_memory": "1MiB", "max_model_len": 64}

Use = Callable[[int], None]  # makes the file of this number, and uses it


def _answer(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello <|im_end|> aab <|end|>")
    llm.tokenizer.decode(range(0, llm.tokenizer.vocab_size, 1 + llm.tokenizer.vocab_size // 500))
    llm.generate([ids[:8] or [1]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))


def load(path: Path, use: Callable[[LLM], object] = _answer, **options: Any) -> None:
    llm = LLM(path, **_SMALL, **options)
    try:
        use(llm)
    finally:
        llm.close()


def _random(seed: int, number: int) -> Random:
    return Random(f"{seed} {number}")


def _gguf(folder: Path, seed: int) -> Use:
    config, letters = tiny.CONFIG, "abcdefghij"
    pieces = [*letters, "▁", "ab", "bc", "abc", "▁a", "cd", "de", "ef", "fg", "gh"]
    starts = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|endoftext|>"]
    vocabularies: dict[str, dict[str, Any]] = {
        "gpt2": {
            "tokens": [*starts, *letters, *"klmnopqrstuvwxyĠ", "ab", "bc", "abc", "Ġa", *"ABCDE"],
            "merges": ["a b", "b c", "ab c", "Ġ a"], "pre": "qwen2",
            "token_type": [2, 3, 3, 3, *[1] * 36],
        },
        "llama": {
            "tokens": [*starts, *(f"<0x{byte:02X}>" for byte in range(97, 112)), *pieces],
            "token_type": [2, 3, 3, 3, 1, *[6] * 15, *[1] * 20],
            "scores": [float(-i) for i in range(40)],
        },
    }  # fmt: skip
    vocabularies["t5"] = vocabularies["llama"] | {"token_type": [2, 3, 3, 3, *[1] * 36],
                                                  "unknown_token_id": 0}  # fmt: skip
    good = []
    for i, (family, kind) in enumerate(
        (("llama", "llama"), ("qwen2", "gpt2"), ("qwen3", "gpt2"), ("llama", "t5"))
    ):
        more = {"qwen2": {"biases": "qkv"}, "qwen3": {"norms": True}}.get(family, {})
        words = {f"tokenizer.ggml.{key}": value for key, value in vocabularies[kind].items()}
        metadata = tiny.gguf_metadata(config, family) | tiny.vocabulary(kind) | words
        weights = tiny.gguf_weights(config, family, **more)
        good.append(tiny.write_gguf(folder / f"good{i}.gguf", metadata, weights).read_bytes())
        load(folder / f"good{i}.gguf")
    path = folder / "m.gguf"

    def use(number: int) -> None:
        rng = _random(seed, number)
        path.write_bytes(damage.damaged_gguf(rng.choice(good), rng))
        load(path)

    return use


def _in_directory(name: str, folder: Path, seed: int) -> Use:
    """A directory in which one file is damaged: its JSON, or as safetensors."""
    write: Callable[[Path], Path] = write_encoder if name == "encoder" else write_model
    model = write(folder / "model")
    file = model / ("modules.json" if name == "encoder" else name)
    if name == "model.safetensors.index.json":
        (model / "model.safetensors").rename(model / "one.safetensors")
        tensors = sorted(tiny.hf_weights(tiny.CONFIG))
        file.write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "one.safetensors")})
        )
    good = file.read_bytes()

    def answer(llm: LLM) -> None:
        _ = llm.embed(["hello"]) if name == "encoder" else _answer(llm)

    load(model, answer)

    def use(number: int) -> None:
        rng = _random(seed, number)
        if name == "model.safetensors":
            file.write_bytes(damage.damaged_safetensors(good, rng))
        else:
            value = damage.damaged_value(json.loads(good), rng, _KEYS.get(name, ()))
            file.write_bytes(damage.as_json(value, rng))
        load(model, answer)

    return use


_KEYS = {
    "config.json": (
        "num_hidden_layers", "rope_scaling", "quantization_config", "head_dim", "sliding_window",
        "layer_types", "num_key_value_heads", "eos_token_id", "vocab_size", "hidden_act",
        "architectures", "model_type", "num_local_experts", "partial_rotary_factor", "rope_theta",
        "text_config", "rms_norm_eps", "max_position_embeddings", "attention_bias", "auto_map",
        "rope_parameters", "tie_word_embeddings",
    ),
    "tokenizer.json": ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation"),
    "generation_config.json": ("temperature", "top_k", "top_p", "eos_token_id", "min_p"),
    "tokenizer_config.json": ("chat_template", "bos_token", "added_tokens_decoder"),
}  # fmt: skip
_TEMPLATES = (
    "{{ messages }}", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "{% if add_generation_prompt %}a{% endif %}{{ bos_token }}", "{{ raise_exception('no') }}",
    "{%- set x = namespace(y=1) %}{{ x.y + 1 }}{{ tools | tojson(indent=2) }}",
)  # fmt: skip
_PIECES = (
    "{{", "}}", "{%", "%}", "for i in range(3)", "endfor", "messages", "[0]", ".content", "|", "*",
    "9", "'x'", "%c", "format", "join", "center", "1/0", "__class__", "macro f()", "endmacro",
    "set x =", "tojson", "\n", "-", "#}", "{#", "strftime_now(", ")", "\ud800", "generation",
)  # fmt: skip


def _template(folder: Path, seed: int) -> Use:
    llm = LLM(write_model(folder / "model"), **_SMALL)

    def use(number: int) -> None:
        rng = _random(seed, number)
        parts = list(rng.choice(_TEMPLATES))
        for _ in range(rng.choice((1, 2, 6))):
            place = rng.randrange(len(parts) + 1)
            parts[place : place + rng.choice((0, 0, 1, 5))] = [rng.choice(_PIECES)]
        template = ChatTemplate("".join(parts), llm.tokenizer)
        try:
            template.render_ids(HELLO)
        finally:
            template.close()

    return use


def _adapter(folder: Path, seed: int) -> Use:
    model = write_model(folder / "model")
    values = np.random.default_rng(1).normal(size=(2, 4, 32)).astype(np.float32)
    pairs = {"model.layers.0.self_attn.q_proj": (values[0], values[1].T.copy())}
    path = lora.write_peft(folder / "adapter", pairs)
    config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    good = config.read_bytes(), weights.read_bytes()
    keys = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora",
            "layers_to_transform", "bias", "peft_type")  # fmt: skip
    llm = LLM(model, **_SMALL, enable_lora=True, max_lora_rank=16)

    def use(number: int) -> None:
        rng = _random(seed, number)
        if rng.random() < 0.5:
            value = damage.damaged_value(json.loads(good[0]), rng, keys)
            config.write_bytes(damage.as_json(value, rng))
            weights.write_bytes(good[1])
        else:
            config.write_bytes(good[0])
            weights.write_bytes(damage.damaged_safetensors(good[1], rng))
        llm.adapters.load(f"a{number}", path)
        llm.adapters.unload(f"a{number}")

    return use


def _packed(folder: Path, seed: int) -> Use:
    """The weights are the same whatever was done to their file."""
    path = folder / "tiny.gguf"
    path.write_bytes(b"as good as any")
    model = replace(checkpoint(PLAIN), path=path, contents=FileDigests({path.name: path}))
    model_weights._WORTH_KEEPING_BYTES = 1
    sizes, said = model_sizes(PLAIN, "int8", "int8"), list[str]()

    def load() -> bytes:
        found = load_weights(
            model, sizes, "int8", 64, folder / "packed", lambda done, total: None, said.append
        )
        return b"".join(data.tobytes() for _, data in found.arrays.values())

    wanted = load()
    (path,) = (folder / "packed").iterdir()
    good = path.read_bytes()

    def use(number: int) -> None:
        said.clear()
        content = damage.damaged_bytes(good, _random(seed, number))
        path.write_bytes(content)
        assert load() == wanted
        is_harmless = content[:40] == good[:40] and content[4096:] == good[4096:]
        assert len(said) == (not is_harmless)

    return use


def _kernels(folder: Path, seed: int) -> Use:
    """What is read is the code that was written, or nothing: no other is run."""
    path, code = folder / "k.o", _random(seed, -1).randbytes(3000)
    good = hashlib.sha256(code).digest() + code

    def use(number: int) -> None:
        content = damage.damaged_bytes(good, _random(seed, number))
        path.write_bytes(content)
        assert _read_cached(path) == (code if content == good else None)

    return use


def _kv_disk(folder: Path, seed: int) -> Use:
    """Each block is read as it was written, or not at all; and new ones are written and read."""
    path = test_segments.filled(folder, 8)
    good = path.read_bytes()

    def use(number: int) -> None:
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        path.write_bytes(damage.damaged_bytes(good, _random(seed, number)))
        segments = test_segments.opened(folder)
        try:
            test_segments.found(segments, 8)
            segments.append(test_segments.record(9))
            assert test_segments.read(segments, 9) == test_segments.record(9)
        finally:
            segments.close()

    return use


def _digest(folder: Path, seed: int) -> Use:
    """A model's digest is that of its file, whatever became of what was kept of it."""
    model, kept = folder / "m.gguf", folder / "kept"
    kept.mkdir()
    model.write_bytes(_random(seed, -1).randbytes(3000))
    contents._WORTH_KEEPING_BYTES = 1
    wanted = FileDigests({"m": model}).digest(kept)
    (path,) = kept.iterdir()
    good = path.read_bytes()

    def use(number: int) -> None:
        rng = _random(seed, number)
        content = damage.as_json(damage.damaged_value(json.loads(good), rng), rng)
        path.write_bytes(damage.damaged_bytes(good, rng) if rng.random() < 0.5 else content)
        assert FileDigests({"m": model}).digest(kept) == wanted

    return use


def _calibration(folder: Path, seed: int) -> Use:
    score = heard(PredictionMonitor(known(source="served")), served())
    path = save_calibration(folder, score.calibration)
    good = json.loads(path.read_bytes())

    def use(number: int) -> None:
        rng = _random(seed, number)
        content = damage.as_json(damage.damaged_value(good, rng), rng)
        path.write_bytes(damage.damaged_bytes(content, rng) if rng.random() < 0.2 else content)
        for one in stored_calibrations(folder):  # then it is used as a server does
            heard(PredictionMonitor(one), _SERVED)
            one.interval(), one.weights_bytes_per_s, one.kv_bytes_per_s, one.file_name

    return use


_SERVED = served(num=5)


def _trace(folder: Path, seed: int) -> Use:
    path = folder / "t.jsonl"
    runs = [recorded(i, plain=i > 3, num_turns=20 + 30 * (i > 3)) for i in range(6)]
    commands: tuple[Callable[[], object], ...] = (
        partial(explain_command, path),
        partial(explain_command, path, out=folder / "o.svg", timeline_file=folder / "o.json"),
        partial(decide_again, path),
        *(
            partial(serve_again, path, None, changes, Options(), diff=True, timeline_file=None)
            for changes in ([], ["max_num_seqs=4"])
        ),
    )

    def use(number: int) -> None:
        rng = _random(seed, number)
        records = list(rng.choice(runs))
        what, place = rng.randrange(9), rng.randrange(len(records))
        if what < 5:
            records[place] = damage.damaged_value(records[place], rng)
        elif what == 5:
            del records[place]
        elif what == 6:
            records.insert(place, rng.choice(records))
        elif what == 7:
            rng.shuffle(records)
        lines = [json.dumps(one, separators=(",", ":")) for one in records]
        if rng.random() < 0.1:
            lines[place % len(lines)] = damage.as_json(records[place % len(lines)], rng).decode(
                "utf-8", "replace"
            )
        content = ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
        path.write_bytes(damage.damaged_bytes(content, rng) if rng.random() < 0.1 else content)
        with suppress(typer.Exit):
            rng.choice(commands)()

    return use


def _stores(folder: Path, seed: int) -> Use:
    """What is kept beside models here and by other programs, listed and looked up."""
    home, hub, ollama = folder / "home", folder / "hub", folder / "ollama"
    manifest = ollama / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest"
    ref = hub / "models--a--b" / "refs" / "main"
    index = hub / "models--a--b" / "snapshots" / "c0ffee" / "model.safetensors.index.json"
    digests = [f"sha256:{number:064x}" for number in range(2)]
    kinds = ("application/vnd.ollama.image.model", "application/vnd.ollama.image.params")
    layers = [{"mediaType": k, "digest": d} for k, d in zip(kinds, digests, strict=True)]
    contents: dict[Path, Any] = {
        manifest: {"layers": layers},
        ollama / "blobs" / digests[1].replace(":", "-"): {"temperature": 0.5, "stop": ["x"]},
        index: {"weight_map": {"x": "m.safetensors"}},
        ref: "c0ffee",
    }
    for path in (*contents, ollama / "blobs" / "x", home / "models" / "x"):
        path.parent.mkdir(parents=True, exist_ok=True)
    (ollama / "blobs" / digests[0].replace(":", "-")).write_bytes(b"GGUF")
    for name in ("config.json", "m.safetensors"):
        (index.parent / name).write_bytes(b"{}")

    def use(number: int) -> None:
        rng = _random(seed, number)
        for path, content in contents.items():
            path.write_text(content if path == ref else json.dumps(content))
        path = rng.choice(list(contents))
        data = damage.as_json(damage.damaged_value(contents[path], rng), rng)
        path.write_bytes(damage.damaged_bytes(data, rng) if rng.random() < 0.3 else data)
        stores = ModelStores(home, hub, (ollama,), ())
        for place in stores.all():
            assert place.size >= 0
        assert all(len(line) < 1000 for line in stores.problems)
        for name in ("ollama:m", "a/b"):
            with suppress(NotPulledError):
                find_model(name, stores, 1 << 30)

    return use


FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
          "model.safetensors", "model.safetensors.index.json", "encoder")  # fmt: skip
KINDS: dict[str, Callable[[Path, int], Use]] = {
    "gguf": _gguf,
    **{name: partial(_in_directory, name) for name in FILES},
    "template": _template,
    "adapter": _adapter,
    "packed": _packed,
    "kernels": _kernels,
    "kv_disk": _kv_disk,
    "digest": _digest,
    "calibration": _calibration,
    "trace": _trace,
    "stores": _stores,
}
