"""Damaged files of every kind that is read are answered, or refused in one line: T35, T45 to T47.

A kind makes a good file, damages it by a number, and uses it as the program would. That happens in
a process of its own with a limit on its memory: a crash or a hang names the number, and the next
process goes on behind it. ``python -m tests.faults.files KIND SEED FIRST COUNT FOLDER`` is one.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import typer

from ridgeline import LLM, SamplingParams
from ridgeline.backends.cpu.layout import model_weights
from ridgeline.backends.cpu.layout.model_weights import load_weights, model_sizes
from ridgeline.cli.explain import explain_command
from ridgeline.cli.replay import replay_command, serve_again
from ridgeline.engine_setup.options import Options
from ridgeline.planner import calibration
from ridgeline.planner.score import Score
from tests import lora
from tests.api.test_llm import HELLO, write_model
from tests.faults import damage
from tests.models import tiny
from tests.models.encoders import write_encoder
from tests.planner.runs import recorded
from tests.planner.test_score import heard, known, served
from tests.tiny import PLAIN, checkpoint

_ROOT = Path(__file__).parents[2]
_MOST_S, _MOST_BYTES = 60.0, 4 << 30  # of one file, on a busy machine; and of addresses
_SMALL: dict[str, Any] = {"backend": "reference", "kv_cache_memory": "1MiB", "max_model_len": 64}

Use = Callable[[int], None]  # makes the file of this number, and uses it


def _answer(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello <|im_end|> aab <|end|>")
    llm.tokenizer.decode(range(0, llm.tokenizer.vocab_size, 1 + llm.tokenizer.vocab_size // 500))
    llm.generate([ids[:8] or [1]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))


def _load(path: Path, use: Callable[[LLM], object] = _answer, **options: Any) -> None:
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
        _load(folder / f"good{i}.gguf")
    path = folder / "m.gguf"

    def use(number: int) -> None:
        rng = _random(seed, number)
        path.write_bytes(damage.damaged_gguf(rng.choice(good), rng))
        _load(path)

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

    _load(model, answer)

    def use(number: int) -> None:
        rng = _random(seed, number)
        if name == "model.safetensors":
            file.write_bytes(damage.damaged_safetensors(good, rng))
        else:
            value = damage.damaged_value(json.loads(good), rng, _KEYS.get(name, ()))
            file.write_bytes(damage.as_json(value, rng))
        _load(model, answer)

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
        from ridgeline.text.chat import ChatTemplate

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
    model = replace(checkpoint(PLAIN), path=folder / "tiny.gguf")
    model.path.write_bytes(b"as good as any")
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


def _calibration(folder: Path, seed: int) -> Use:
    path = heard(Score(known(source="served")), served()).calibration.save(folder)
    good = json.loads(path.read_bytes())

    def use(number: int) -> None:
        rng = _random(seed, number)
        content = damage.as_json(damage.damaged_value(good, rng), rng)
        path.write_bytes(damage.damaged_bytes(content, rng) if rng.random() < 0.2 else content)
        for one in calibration.all_of(folder):  # then it is used as a server does
            heard(Score(one), _SERVED)
            one.interval(), one.weights_bytes_per_s, one.kv_bytes_per_s, one.path(folder)

    return use


_SERVED = served(num=5)


def _trace(folder: Path, seed: int) -> Use:
    path = folder / "t.jsonl"
    runs = [recorded(i, plain=i > 3, num_turns=20 + 30 * (i > 3)) for i in range(6)]
    commands: tuple[Callable[[], None], ...] = (
        partial(explain_command, path),
        partial(explain_command, path, out=folder / "o.svg", timeline_file=folder / "o.json"),
        partial(replay_command, path),
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


_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
          "model.safetensors", "model.safetensors.index.json", "encoder")  # fmt: skip
KINDS: dict[str, Callable[[Path, int], Use]] = {
    "gguf": _gguf,
    **{name: partial(_in_directory, name) for name in _FILES},
    "template": _template,
    "adapter": _adapter,
    "packed": _packed,
    "calibration": _calibration,
    "trace": _trace,
}


# --- the process that uses files, and who watches it ---------------------------------------------


def _outcome(use: Use, number: int) -> str:
    """Return what is wrong with how a file is answered; "" if nothing is."""
    said = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            use(number)
        line = ""
    except (ValueError, OSError) as error:  # which the command line makes a line of
        line = str(error)
        if (
            isinstance(error, OSError)
            and not isinstance(error, ChildProcessError)
            and not error.filename
        ):
            return f"an error without the file's name: {error!r}"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/ridgeline/" in frame.filename] or frames
        place = f"{ours[-1].filename.split('/ridgeline/')[-1]}:{ours[-1].lineno}"
        return f"{error!r:.150} at {place}"
    if len(line) > 2100 or "\n" in line.strip():
        return f"{len(line)} letters, or several lines: {line[:100]!r}"
    return "a traceback is printed" if "Traceback" in said.getvalue() else ""


def _child(kind: str, seed: int, first: int, count: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ["RIDGELINE_HOME"], os.environ["COLUMNS"] = str(folder / "home"), "100"
    use = KINDS[kind](folder, seed)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    for number in range(first, first + count):
        print(f"{number} begins", flush=True)
        if problem := _outcome(use, number):
            print(f"{number} {problem}".encode("ascii", "backslashreplace").decode(), flush=True)


def damaged(kind: str, count: int, seed: int, folder: Path) -> dict[str, list[int]]:
    """Use files of a kind; return what went wrong, and with which numbers."""
    problems: dict[str, list[int]] = {}
    first = 0
    while first < count:
        place = folder / f"{kind}-{first}"
        place.mkdir()
        command = [sys.executable, "-m", "tests.faults.files", kind, str(seed), str(first)]
        command += [str(count - first), str(place)]
        process = subprocess.Popen(
            command, stdout=-1, stderr=-1, text=True, errors="replace", cwd=_ROOT
        )
        words: list[str] = []
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=_read, args=(process.stdout, lines.put)),
            threading.Thread(target=_read, args=(process.stderr, words.append)),
        ]
        for reader in readers:
            reader.start()
        limit_s, number, ended = 60.0, first, ""
        while True:
            try:
                line = lines.get(timeout=limit_s)
            except queue.Empty:
                ended = "it hangs"
                break
            if not line:
                break
            number, limit_s = int(line.split()[0]), _MOST_S
            if not line.endswith("begins\n"):
                problems.setdefault(line.partition(" ")[2].strip(), []).append(number)
        process.kill()
        status = process.wait()
        for reader in readers:
            reader.join()
        if ended or status:
            ended = ended or f"the process ends with {status}: {''.join(words)[-300:]}"
            problems.setdefault(ended, []).append(number)
        first = number + 1 if ended else count
        shutil.rmtree(place, ignore_errors=True)
    return problems


def _read(stream: Any, take: Callable[[str], object]) -> None:
    for line in stream:
        take(line)
    take("")


def used(kinds: tuple[str, ...], count: int, rng: Random) -> str:
    """Use ``count`` files of each kind, two kinds at a time; return that all is as it should be."""
    seed = rng.randrange(1 << 30)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        all_problems = pool.map(lambda kind: damaged(kind, count, seed, Path(folder)), kinds)
        for kind, problems in zip(kinds, all_problems, strict=True):
            assert not problems, (kind, seed, problems)
    return f"{count} of each of {', '.join(kinds)}: each is answered, or refused in a line"


def t35(model: Path, count: int, rng: Random) -> str:
    """Directories that bring code, or lead out of themselves: nothing of it runs or is read."""
    with tempfile.TemporaryDirectory() as name:
        folder, canary = Path(name), Path(name) / "canary"
        outside = folder / "outside.json"
        outside.write_text((model / "config.json").read_text())
        code = f"open({str(canary)!r}, 'w').close()"

        class Pickled:
            def __reduce__(self) -> tuple[Any, ...]:
                return exec, (code,)

        def own_code(path: Path) -> None:
            config = json.loads((path / "config.json").read_text())
            config |= {"auto_map": {"AutoModelForCausalLM": "modeling_x.Model"}}
            (path / "config.json").write_text(json.dumps(config))
            for file in ("modeling_x.py", "conftest.py", "json.py", "tokenizers.py"):
                (path / file).write_text(code)

        def pickles(path: Path) -> None:
            (path / "model.safetensors").unlink()
            (path / "pytorch_model.bin").write_bytes(pickle.dumps(Pickled()))

        def index_outside(path: Path) -> None:
            (path / "model.safetensors").rename(folder / f"{path.name}.safetensors")
            names = (f"../{path.name}.safetensors", str(folder / f"{path.name}.safetensors"))
            index = {"weight_map": {"lm_head.weight": rng.choice(names)}}
            (path / "model.safetensors.index.json").write_text(json.dumps(index))

        def link_outside(path: Path) -> None:
            (path / "config.json").unlink()
            (path / "config.json").symlink_to(outside)

        def huge(path: Path) -> None:
            os.truncate(path / "tokenizer.json", 1 << 40)  # a file with a hole

        def no_file(path: Path) -> None:
            victim = path / rng.choice(("config.json", "tokenizer.json", "model.safetensors"))
            victim.unlink()
            rng.choice((os.mkfifo, os.mkdir))(victim)

        attacks = (own_code, pickles, index_outside, link_outside, huge, no_file)
        for i in range(count):
            path = shutil.copytree(model, folder / f"m{i}")
            attack = attacks[i % len(attacks)]
            attack(path)
            wrong = _outcome(lambda _, path=path: _load(path), i)
            assert not wrong, (attack, wrong)
            assert not canary.exists(), attack
            shutil.rmtree(path)
    return f"{count} directories answer or are refused in a line; no code of theirs was run"


def t45(model: Path, count: int, rng: Random) -> str:
    return used(("gguf",), count, rng)


def t46(model: Path, count: int, rng: Random) -> str:
    return used((*_FILES, "template", "adapter"), count, rng)


def t47(model: Path, count: int, rng: Random) -> str:
    return used(("packed", "calibration", "trace"), count, rng)


if __name__ == "__main__":
    _child(sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5]))
