"""``ridgeline verify``: an answer is computed again from its receipt, and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import UsageError
from ridgeline.engine.setup.build import packed_folder
from ridgeline.engine.setup.home import default_home, locate, stores
from ridgeline.engine.setup.progress import say
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.hub.search import find_model
from ridgeline.system.machine import available_bytes

if TYPE_CHECKING:
    from ridgeline import LLM
    from ridgeline.trust.receipts.reading import Signed
    from ridgeline.trust.receipts.statement import Receipt

_PARTLY = 3  # exit status: the tokens are equal, and nothing shows that the texts are theirs


def verify(
    receipt: Annotated[
        Path,
        typer.Argument(
            metavar="RECEIPT",
            help="A file with a receipt: an answer or a stream as it came, or the receipt alone.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model to compute with. Default: the pulled model that the receipt names.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The signer's public key in PEM (/v1/receipts/key). Default: receipt.key in "
            "RIDGELINE_HOME, for receipts that it signed.",
        ),
    ] = None,
    prompt: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON file with what was asked, which must be the receipt's prompt: a text, token "
            "ids or messages; of several prompts a list of these.",
        ),
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(help="LoRA adapter, as for serve; repeatable.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with the chat template, as for serve.")
    ] = None,
) -> None:
    """Compute an answer again, and say whether it is the receipt's, or where it first differs.

    Exit status 1 if it is not, and 3 if rules may have changed what it shows.
    """
    from ridgeline.trust.receipts.reading import read

    try:
        signed = read(receipt.read_bytes())
    except ValueError as error:
        raise ValueError(f"{receipt} is not a receipt: {error}") from None
    said = signed.receipt
    num_tokens = sum(one.tokens.num for each in said.prompts for one in each.answers)
    print(
        f"{receipt}: {num_tokens} tokens of {said.model.name} by {said.engine}, {said.time}, "
        f"request {said.request}"
    )
    is_checked, wrong = _signature(signed, key)
    wrong += _file(signed)
    name, path = _located(said, model)
    wrong += _files(said, path)
    if not wrong:
        wrong = _computed(signed, name, prompt, lora, chat_template)
    for one in wrong:
        print(f"  wrong: {one}")
    if wrong:
        print("NOT EQUAL")
        raise typer.Exit(1)
    if said.rules is not None:
        print(f"PARTLY EQUAL: {_part(said)}")
        raise typer.Exit(_PARTLY)
    unproved = "its signature was not checked" if signed.signatures else "it is not signed"
    but = "" if is_checked else f", but {unproved}"
    print(f"EQUAL{but}: computed again, every token is the same")


def _part(said: Receipt) -> str:
    """Say what of an answer under rules was computed."""
    ends = [one.finish for each in said.prompts for one in each.answers]
    num_tokens = sum(one.tokens.num for each in said.prompts for one in each.answers)
    cut = f", where a rule ended {ends.count('content_filter')} of {len(ends)} answers"
    until = cut if "content_filter" in ends else ""
    return (
        f"the {num_tokens} tokens are the same{until}; rules may have changed the texts, so only "
        "the signature says that these are the texts"
    )


def _signature(signed: Signed, file: Path | None) -> tuple[bool, list[str]]:
    """Say whose signature a receipt has; return whether it is checked, and what is wrong."""
    from ridgeline.trust.receipts.signing import (
        KEY_FILE,
        NEEDED,
        is_signed,
        may_be_one,
        read_public_key,
    )

    own = default_home() / KEY_FILE
    if not signed.signatures:
        print("  it is not signed: anybody may have written it")
        return False, [f"it is not signed, and {file} is to check that"] if file else []
    try:
        public = read_public_key(file or own) if file or own.exists() else None
    except ModuleNotFoundError:
        raise UsageError(NEEDED) from None
    names = [str(one.get("keyid")) for one in signed.signatures]
    if public is None or (file is None and public.name not in names):
        print(
            f"  signed with the key {names[0]:.16}, which was not checked: give the signer's key "
            "with --key"
        )
        odd = [i for i, one in enumerate(signed.signatures) if not may_be_one(one)]
        return False, [f"signatures[{i}] is none: Ed25519 has 64 bytes in base64" for i in odd]
    file = file or own
    if any(is_signed(signed.payload, one, public) for one in signed.signatures):
        print(f"  signed with the key {public.name[:16]} of {file}")
        return True, []
    return True, [f"it is not signed with the key of {file}, or was changed since"]


def _file(signed: Signed) -> list[str]:
    """Say whether a file shows what the receipt states; return what is wrong with it."""
    from ridgeline.trust.receipts.compare import wrong_in_file

    if signed.shown is None:
        print("  the file has the receipt alone, so no texts are compared with it")
        return []
    wrong = list(wrong_in_file(signed.receipt, signed.subject, signed.shown))
    if not wrong:
        print(f"  its texts are the receipt's: {', '.join(name for name, _ in signed.subject)}")
    if names := list(dict.fromkeys(one.rpartition(".")[2] for one in signed.shown.claims)):
        print(f"  not compared, as only the server says it: {', '.join(names)}")
    return wrong


def _located(said: Receipt, model: str | None) -> tuple[str, Path]:
    """Return what the model is called, and where it is. Nothing is pulled for a receipt's sake."""
    if model is not None:
        return model, locate(model).path
    name = said.model.name
    try:
        if "/" in name or name.startswith(("~", ".")):
            raise ValueError(name)
        return name, find_model(name, stores(), available_bytes()).path
    except ValueError:  # NotPulledError is one
        digest = said.model.digest[:16]
        raise UsageError(
            f"no model {name!r:.80} is here: name the receipt's model (sha256 {digest}...) as well"
        ) from None


def _files(said: Receipt, path: Path) -> list[str]:
    from ridgeline.trust.receipts.verify import other_files

    contents, folder = load_checkpoint(path).contents, packed_folder()
    return list(other_files(said, contents.digest(folder), contents.each(folder)))


def _computed(
    signed: Signed,
    model: str,
    prompt: Path | None,
    lora: list[str] | None,
    chat_template: Path | None,
) -> list[str]:
    from ridgeline.trust.receipts.compare import wrong_in_answer
    from ridgeline.trust.receipts.verify import compute, notes_on, opened

    said = signed.receipt
    with opened(said, model, chat_template=chat_template, lora=lora) as llm:
        for note in notes_on(said, llm):
            print(f"  note: {note}")
        wrong, answers = compute(said, llm, _prompts(said, llm, prompt))
    return wrong or list(wrong_in_answer(said, signed.subject, signed.shown, answers))


def _prompts(said: Receipt, llm: LLM, file: Path | None) -> list[list[int]]:
    """Return the ids of the prompts: those that a file has, else the receipt's own."""
    if file is None:
        hidden = any(one.tokens.ids is None for one in said.prompts)
        if hidden:
            raise UsageError("the receipt has only a digest of its prompt: give --prompt FILE")
        return [list(one.tokens.ids or ()) for one in said.prompts]
    try:
        given: Any = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(
            f"{file} is not JSON: write a text, token ids or messages as JSON"
        ) from None
    if len(said.prompts) == 1:
        given = [given]
    if not isinstance(given, list) or len(given) != len(said.prompts):
        raise ValueError(f"{file} must have a list of {len(said.prompts)} prompts")
    say("comparing the prompt with that of the receipt")
    return [llm.text.encode_any(one) for one in given]
