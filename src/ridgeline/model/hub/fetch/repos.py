"""Repositories of the Hugging Face hub: what is in them, which files to take, and fetching those.

The hub's own library talks to it, so its settings count: HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
What arrives is checked against the announced sizes and hashes before it gets its name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from ridgeline.model.hub.fetch.download import (
    ELSEWHERE,
    WAY_OUT,
    Progress,
    download,
    hidden,
    only_one,
)
from ridgeline.model.hub.fetch.index import IndexSource
from ridgeline.model.hub.library import HubName
from ridgeline.model.hub.quantisations import GgufModel, gguf_models, needed_bytes, pick
from ridgeline.system.machine import check_room, rename
from ridgeline.system.report import gb

if TYPE_CHECKING:
    from huggingface_hub import RepoFile
    from huggingface_hub.hf_api import RepoSibling

_OF_A_DIRECTORY = re.compile(
    r"[\w-][\w.-]*\.(json|jinja|safetensors)|additional_chat_templates/[\w-]+\.jinja"
)
# No part of a path may begin with a dot, so "../" is not one.
_SAFE_PATH = re.compile(r"(?!\.)[^/\\\0]+(/(?!\.)[^/\\\0]+)*")


class Entry(NamedTuple):
    """What the hub says of a file."""

    size: int
    sha256: str | None  # None for small files, which the hub keeps without one
    blob: str = ""  # the name of its bytes in git


def fetch(
    name: HubName,
    directory: Path,
    budget_bytes: int,
    announce: Callable[[str], None],
    progress: Progress | None = None,
) -> Path:
    """Fetch a model into ``directory / owner / name``; return its .gguf file, or that directory.

    A download that was cut goes on where it stopped.

    Args:
        name: repository, and which file of it.
        directory: where models are kept; created when missing.
        budget_bytes: memory that is free: decides which quantisation to take if none is named.
        announce: told in a line what is taken, before it is fetched.
        progress: called with (bytes so far, bytes in all).

    Raises:
        ValueError: there is no such repository or file, it needs consent or a login, it is out of
            reach, or no room is left on the disk.
        ModelFileError: what arrived is not what was announced; it is removed.
    """
    target = directory / name.folder
    with only_one(target):
        revision, files = files_of(name)
        wanted, path, why = wanted_of(name, files, budget_bytes)
        total = sum(files[file].size for file in wanted)
        needed = needed_bytes(total)
        free = "" if why else f", and {gb(budget_bytes)} is free"
        announce(
            f"{name.folder}: {why or path or 'its safetensors'}; {gb(total)} to fetch; to "
            f"run it needs about {gb(needed)} of memory{free}"
        )
        check_room(target.parent, total, name.folder, ELSEWHERE)
        partial, before = hidden(target, "partial"), 0
        for file in wanted:
            shown = _behind(before, total, progress)
            fetch_file(name.repo, revision, file, files[file], partial, shown)
            before += files[file].size
        for file in wanted:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            rename(partial / file, target / file)
        shutil.rmtree(partial)
    return target / path if path else target


def files_of(name: HubName) -> tuple[str, dict[str, Entry]]:
    """Return the commit that a name means, the newest unless it says one, and its files by paths.

    Raises ValueError as ``fetch`` does.
    """
    from huggingface_hub import HfApi, RepoFile  # half a second, for this alone

    hub = HfApi()
    with _explained(name.repo):
        info = hub.model_info(name.repo, revision=name.revision or None, files_metadata=True)
        siblings: Sequence[RepoSibling | RepoFile] = info.siblings or ()
        if any(file.size is None for file in siblings):  # a mirror may tell names alone
            listed = hub.list_repo_tree(name.repo, recursive=True, revision=info.sha)
            siblings = [file for file in listed if isinstance(file, RepoFile)]
    files = {
        file.rfilename: Entry(
            file.size or 0, file.lfs.sha256 if file.lfs else None, file.blob_id or ""
        )
        for file in siblings
        if _SAFE_PATH.fullmatch(file.rfilename)
    }
    return info.sha or "main", files


def wanted_of(
    name: HubName, files: Mapping[str, Entry], budget_bytes: int
) -> tuple[list[str], str, str]:
    """Return which files to fetch, the first of a GGUF model (empty for a directory), and why.

    Without a tag they are the safetensors, or, where those do not fit, a GGUF model that does.
    """
    directory = [
        file
        for file in files
        if _OF_A_DIRECTORY.fullmatch(file)
        and not file.startswith("consolidated")  # the same weights once more
    ]
    models = gguf_models({file: entry.size for file, entry in files.items()})
    directory.sort(key="config.json".__eq__)  # last: with it the model counts as whole
    has_safetensors = any(file.endswith(".safetensors") for file in directory)
    if has_safetensors and not name.tag:
        needed = needed_bytes(sum(files[file].size for file in directory))
        fitting = _that_fits(models, budget_bytes) if needed > budget_bytes else None
        if fitting is None:
            return directory, "", ""
        model, why = fitting
        return (
            list(model.files),
            model.files[0],
            f"{why}; its safetensors need {gb(needed)}",
        )
    if not models:
        if has_safetensors:
            raise ValueError(
                f"{name.repo} has no .gguf files, only safetensors: leave out :{name.tag}"
            )
        raise ValueError(
            f"{name.repo} has neither .gguf files nor safetensors that run here: name another "
            "repository"
        )
    try:
        model, why = pick(models, name.tag, budget_bytes)
    except ValueError as error:
        raise ValueError(f"{name.repo}: {error}") from error
    return list(model.files), model.files[0], why


def _that_fits(models: Sequence[GgufModel], budget_bytes: int) -> tuple[GgufModel, str] | None:
    """Return the best of ``models`` that fits into memory, and why; None if there is none."""
    try:
        model, why = pick(models, "", budget_bytes) if models else (None, "")
    except ValueError:  # all are too large
        return None
    if model is None or model.needed_bytes > budget_bytes:  # an only one is taken unasked
        return None
    return (
        model,
        why or f"{model.tag} ({gb(model.size)}) fits {gb(budget_bytes)} of free memory",
    )


def _behind(before: int, total: int, progress: Progress | None) -> Progress | None:
    """Return a progress of one file, behind others, as that of all."""
    return progress and (lambda done, _: progress(before + done, total))


def fetch_file(
    repo: str,
    revision: str,
    name: str,
    announced: Entry,
    folder: Path,
    progress: Progress | None = None,
) -> None:
    """Fetch one file into ``folder``, or what is missing of it. Raises as ``fetch`` does.

    The hub's library says where it is. It is not downloaded by that library, which begins a cut
    file anew, compares no checksum, and writes down all that a server sends.
    A hub may announce of a small file neither size nor checksum: then what arrives is taken.
    """
    source, path = place_of(repo, revision, name), folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if announced.sha256 is not None:
        download(source, path, announced.sha256, progress, size=announced.size)
        return
    path.unlink(missing_ok=True)  # it may be of another commit, and is downloaded again at once
    size = announced.size if announced.blob else announced.size or None
    download(source, path, announced.blob, progress, size=size, checksum_of=_git_blob_of)


def place_of(repo: str, revision: str, name: str) -> IndexSource:
    """Return where a file is. Raises ValueError as ``fetch`` does."""
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url

    with _explained(repo):
        url = hf_hub_url(repo, name, revision=revision)
        place = get_hf_file_metadata(url).location
        token = get_token() if urlsplit(place).netloc == urlsplit(url).netloc else None
    return IndexSource(place, headers=(("Authorization", f"Bearer {token}"),) if token else ())


def _git_blob_of(path: Path) -> str:
    from huggingface_hub.utils.sha import git_hash

    return git_hash(path.read_bytes())


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn the errors of the hub's library into one line with a way out."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{repo} is gated: accept its terms on its page on the hub, then set HF_TOKEN to a "
            "token of your account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"the hub has no repository {repo!r}, or it is private: check the name, or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"{repo} has no such revision: give a branch, a tag or a commit"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise ValueError(
            f"{repo} is not on this machine, and HF_HUB_OFFLINE forbids downloads: unset it, or "
            f"{WAY_OUT}"
        ) from error
    # Others share no base but Exception, and change between the library's versions.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"cannot get {repo} from the hub ({reason}); {WAY_OUT}") from error
