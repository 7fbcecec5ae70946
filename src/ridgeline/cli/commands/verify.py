"""``ridgeline verify``: an answer is computed again from its receipt, and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import UsageError
from ridgeline.engine_setup.build import packed_folder
from ridgeline.engine_setup.home import default_home
from ridgeline.engine_setup.locate import locate, stores
from ridgeline.engine_setup.progress import say
from ridgeline.hub.find import find_model
from ridgeline.machine import available_bytes
from ridgeline.models.checkpoint import load_checkpoint

if TYPE_CHECKING:
    from ridgeline import LLM
    from ridgeline.api.receipts.reading import Signed
    from ridgeline.api.receipts.statement import Receipt


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

    Exit status 1 if it is not.
    """
    from ridgeline.api.receipts.reading import read

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
    wrong = _signature(signed, key) + _texts(signed)
    name, path = _located(said, model)
    wrong += _files(said, path)
    if not wrong:
        wrong = _computed(said, name, prompt, lora, chat_template)
    for one in wrong:
        print(f"  wrong: {one}")
    if wrong:
        print("NOT EQUAL")
        raise typer.Exit(1)
    print("EQUAL: computed again, every token is the same")


def _signature(signed: Signed, file: Path | None) -> list[str]:
    """Say whose signature a receipt has; return what is wrong with it."""
    from ridgeline.api.receipts.signing import KEY_FILE, NEEDED, is_signed, read_public_key

    own = default_home() / KEY_FILE
    if not signed.signatures:
        print("  it is not signed: anybody may have written it")
        return []
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
        return []
    file = file or own
    if any(is_signed(signed.payload, one, public) for one in signed.signatures):
        print(f"  signed with the key {public.name[:16]} of {file}")
        return []
    return [f"it is not signed with the key of {file}, or was changed since"]


def _texts(signed: Signed) -> list[str]:
    """Say whether the texts of the answer are the receipt's; return what is wrong with them."""
    if signed.answer is None:
        print("  the file does not have the complete texts, so they are not compared")
        return []
    others = [
        f"{place} is not the text that the receipt is about" for place in signed.other_texts()
    ]
    if not others:
        print(f"  its texts are the receipt's: {', '.join(signed.shown)}")
    return others


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
    from ridgeline.api.receipts.verify import other_files

    contents, folder = load_checkpoint(path).contents, packed_folder()
    return list(other_files(said, contents.digest(folder), contents.each(folder)))


def _computed(
    said: Receipt,
    model: str,
    prompt: Path | None,
    lora: list[str] | None,
    chat_template: Path | None,
) -> list[str]:
    from ridgeline.api.receipts.verify import differences, notes_on, opened

    with opened(said, model, chat_template=chat_template, lora=lora) as llm:
        for note in notes_on(said, llm):
            print(f"  note: {note}")
        return list(differences(said, llm, _prompts(said, llm, prompt)))


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
