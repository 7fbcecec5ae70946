"""What patterns cost, beside the same without them, on a machine that does nothing else.

    python -m tests.trust.rules.cost              # all of it, a few minutes
    python -m tests.trust.rules.cost compile texts

2,000 patterns and all kinds. Figures are ratios of times of the same run.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from ridgeline import LLM
from ridgeline.engine.setup.home import locate
from ridgeline.trust.rules.kinds import KINDS
from ridgeline.trust.text_rules.answer import TextRule, TextRules, screened
from ridgeline.trust.text_rules.patterns import TextPattern
from tests.serve.serving import serving

_NUM, _ROUNDS, _TOKENS = 2000, 40, 60
_RULES = """version = "1"
[keys.default]
[keys.kinds]
output = ["kinds"]
input = ["kinds"]
[keys.many]
output = ["many"]
input = ["many"]
[rules.kinds]
kinds = [KINDS]
action = "redact"
[rules.many]
patterns = [PATTERNS]
action = "redact"
"""


def expressions() -> list[str]:
    """Names of two words; every fourth has a number behind it, or a word that ends in two ways."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(_NUM)]
    ends = ["", r"-\d{4}", "(?:er|s)?", ""]
    return [f"{word} {rng.choice(words)}{ends[i % 4]}" for i, word in enumerate(words)]


def rules_of(patterns: list[TextPattern]) -> TextRules:
    return TextRules([TextRule("x", one, "redact", "[X]") for one in patterns])


MANY, ALL_KINDS = [TextPattern(one) for one in expressions()], list(KINDS.values())


def texts(num_chars: int) -> dict[str, str]:
    """Texts of a length: prose, and digits in three ways that cards and telephones begin with."""
    rng = random.Random(2)
    prose = (Path(__file__).parents[3] / "LICENSE").read_text() * 9
    digits = "".join(rng.choices("0123456789", k=num_chars))
    grouped = " ".join(digits[i : i + 4] for i in range(0, num_chars, 4))
    return {
        "prose": prose[:num_chars],
        "one run of digits": digits,
        "digits in fours": grouped[:num_chars],
        "one digit": "4" * num_chars,
    }


def note(rule: TextRule) -> None:
    """Count nothing."""


def seconds(run: Callable[[], object]) -> float:
    """Of the processor, so that other programs count little."""
    begin_s = time.process_time()
    run()
    return time.process_time() - begin_s


def least(run: Callable[[], object]) -> float:
    return min(seconds(run) for _ in range(5))


def compile_() -> None:
    """How long patterns take to compile, beside Python's own."""

    def by_re(patterns: list[TextPattern]) -> None:
        re.purge()
        for one in patterns:
            re.compile(one.expression)

    for name, patterns in ((f"{_NUM} patterns", MANY), ("all kinds", ALL_KINDS)):
        ours, theirs = least(partial(rules_of, patterns)), least(partial(by_re, patterns))
        print(f"compile {name}: {ours / theirs:.1f} of what re takes")


def texts_() -> None:
    """How long it takes to search a prompt, beside the time to make tokens of it."""
    with LLM(locate("smollm2").path, kv_cache_memory="16MiB") as llm:
        _texts(llm.tokenizer.encode)


def _texts(encode: Callable[[str], object]) -> None:
    for name, patterns in ((f"{_NUM} patterns", MANY), ("all kinds", ALL_KINDS)):
        rules = rules_of(patterns)
        for num_chars in (1000, 4000, 16000):
            for kind, text in texts(num_chars).items():
                first_s = seconds(partial(screened, text, rules, note))
                search_s = least(partial(screened, text, rules, note))
                tokens_s = least(partial(encode, text))
                ratios = f"{first_s / tokens_s:.2f} at first, then {search_s / tokens_s:.2f}"
                print(f"{name}, {num_chars} characters, {kind}: {ratios}")


def answers() -> None:
    """How long streamed answers take, by keys of one server with patterns and without."""
    with tempfile.TemporaryDirectory() as folder:
        keys, rules = Path(folder) / "keys", Path(folder) / "rules.toml"
        keys.write_text("".join(f"{name} key-of-{name}-0123456789\n" for name in _SIDES))
        text = _RULES.replace("PATTERNS", ", ".join(f"'{one}'" for one in expressions()))
        rules.write_text(text.replace("KINDS", ", ".join(f"'{one}'" for one in KINDS)))
        room = {"kv_cache_memory": "64MiB"}
        with serving(locate("smollm2").path, room, api_key_file=keys, rules=rules) as served:

            def ask(side: str, seed: int, **fields: object) -> float:
                body = {"prompt": f"{seed} The river", "max_tokens": _TOKENS, "seed": seed}
                key = {"authorization": f"Bearer key-of-{side}-0123456789"}
                begin_s = time.perf_counter()
                status, answer, _ = served.call(
                    "/v1/completions", body | {"stream": True} | fields, **key
                )
                assert status == 200, answer
                return time.perf_counter() - begin_s

            prose = {"ignore_eos": True}
            digits = {"structured_outputs": {"regex": "[0-9]{200}"}}
            for name, fields in (("prose", prose), ("digits", digits)):
                rounds = []
                for seed in range(_ROUNDS + 1):
                    order = _SIDES if seed % 2 else _SIDES[::-1]
                    rounds.append({side: ask(side, seed, **fields) for side in order})
                for side in _SIDES[1:]:
                    _tell(f"answers of {name} with {side}", side, rounds[1:])


def _tell(name: str, side: str, rounds: list[dict[str, float]]) -> None:
    with_s, without_s = (sum(one[key] for one in rounds) for key in (side, "default"))
    ratios = [one[side] / one["default"] for one in rounds]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{name}: {with_s / without_s:.3f} in sum, median {median(ratios):.3f}, {spread}")


_SIDES = ["default", "kinds", "many"]
MEASURED = {"compile": compile_, "texts": texts_, "answers": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", nargs="*", choices=[[], *MEASURED], help="all, if none is named")
    for name in parser.parse_args().what or MEASURED:
        print(f"load {os.getloadavg()[0]:.1f}")
        MEASURED[name]()


if __name__ == "__main__":
    main()
