"""Record the beam searches of Hugging Face transformers, in float32, for a model in a GGUF file.

Run it in the environment of ``make test-parity``, as ``tools/record_reference.py``, which reads the
model::

    python tools/record_beams.py MODEL.gguf tests/data/reference/NAME.beams.json

Full stops and line ends stop an answer, so that searches with all kinds of length penalty and early
stopping have something to choose.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers  # type: ignore[import-not-found]
from record_reference import byte_level_vocabulary, load_model

NUM_TOKENS = 24
STOPS = (".", "\n")
TEXTS = (
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "def fibonacci(n):",
    "Water boils at 100 degrees. Ice",
    "The three primary colours are",
    "My favourite book is",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"num_beams": 2},
    {"num_beams": 4, "early_stopping": True},
    {"num_beams": 4, "length_penalty": 2.0},
    {"num_beams": 3, "length_penalty": 0.0},
    {"num_beams": 5, "length_penalty": 1.5, "early_stopping": "never"},
    {"num_beams": 3, "length_penalty": -0.5, "min_new_tokens": 3},
)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def search(model: Any, prompt_ids: list[int], stops: list[int], settings: dict[str, Any]) -> Any:
    """Return all answers of a search, best first: token ids up to the end, and scores."""
    width = settings["num_beams"]
    beams = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        **settings,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=stops,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    for row, score in zip(beams.sequences.tolist(), beams.sequences_scores.tolist(), strict=True):
        ids = row[len(prompt_ids) :]
        end = next((i for i, token in enumerate(ids) if token in stops), NUM_TOKENS - 1)
        answers.append({"output_ids": ids[: end + 1], "score": round(score, 5)})
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file with a byte-level vocabulary")
    parser.add_argument("out", type=Path, help="the JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation, so that a second run gives the same file
    reader = gguf.GGUFReader(args.model)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    encode, _ = byte_level_vocabulary(meta)
    model = load_model(reader, meta)
    stops = [token for text in STOPS for token in encode(text)]
    header = {
        "model": args.model.name,
        "sha256": hashlib.sha256(args.model.read_bytes()).hexdigest(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "command": f"python tools/record_beams.py {args.model.name} {args.out.name}",
        "stop_token_ids": stops,
        "max_tokens": NUM_TOKENS,
    }
    lines = []
    for text in TEXTS:
        for settings in SETTINGS:
            prompt_ids = encode(text)
            answers = search(model, prompt_ids, stops, settings)
            row = {"prompt_ids": prompt_ids, "wish": settings, "answers": answers}
            lines.append(json.dumps(row, separators=(",", ":")))
            print(f"{len(lines):3} {text!r} {settings} {answers[0]['score']}", flush=True)
    body = ",\n".join(lines)
    args.out.write_text(f'{{"header":{json.dumps(header)},\n"searches":[\n{body}\n]}}\n')


if __name__ == "__main__":
    main()
