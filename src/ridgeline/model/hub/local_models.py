"""Where models lie on this machine: what we pulled, the hub's cache, Ollama's store, LM Studio's.

The last three belong to other programs: they are read and never changed. Nothing here needs a
network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.model.hub.library import HubName
from ridgeline.model.hub.quantisations import gguf_models, names_of, pick
from ridgeline.model.hub.short_names import SHORT_NAMES

_MOST_MANIFEST_BYTES, _MOST_INDEX_BYTES = 1 << 20, 64 << 20
_COMMIT = re.compile(r"\w[\w.-]{0,99}")  # a folder's name, and no way out of it
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_OLLAMA_HOST, _OLLAMA_OWNER = "registry.ollama.ai", "library"  # left out in a model's name
_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")  # where its Linux service keeps them
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_ADAPTER = "application/vnd.ollama.image.adapter"
_OLLAMA_PARAMS = "application/vnd.ollama.image.params"
# Ollama's names of sampling parameters, and ours.
_OLLAMA_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "stop": "stop",
}


class StoredModel(NamedTuple):
    """A model on this machine.

    Attributes:
        name: what a command takes to mean it.
        path: its .gguf file, or the first of several, or its directory.
        files: everything it consists of.
        owner: who put it there: "ridgeline", "hub cache", "ollama" or "lm studio".
        sampling: defaults that stand beside it.
    """

    name: str
    path: Path
    files: tuple[Path, ...]
    owner: str
    sampling: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True)
class ModelStores:
    """Directories in which models may lie.

    Attributes:
        home: Ridgeline's own; what is pulled lies in its ``models``.
        hub_cache: of the hub's library.
        ollama: each with ``manifests`` and ``blobs``.
        lm_studio: each with ``owner/name/*.gguf``.
        problems: what could not be read, in words; filled as stores are looked through.
    """

    home: Path
    hub_cache: Path
    ollama: tuple[Path, ...]
    lm_studio: tuple[Path, ...]
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, home: Path, environ: Mapping[str, str], user: Path) -> ModelStores:
        """Return the directories that ``environ`` names, else those below the ``user``'s own."""
        cache = Path(environ.get("XDG_CACHE_HOME") or user / ".cache")
        hub_home = Path(environ.get("HF_HOME") or cache / "huggingface")
        named = environ.get("OLLAMA_MODELS")
        return cls(
            home,
            Path(environ.get("HF_HUB_CACHE") or hub_home / "hub"),
            (Path(named),) if named else (user / ".ollama" / "models", _OLLAMA_SERVICE),
            (user / ".lmstudio" / "models", user / ".cache" / "lm-studio" / "models"),
        )

    def repositories(self) -> Iterator[tuple[str, Path, str]]:
        """Yield ``owner/name``, the folder and the owner of all that lies as on the hub."""
        for folder in _folders(self.home / "models"):
            yield _last_two(folder), folder, "ridgeline"
        for folder in _listed(self.hub_cache):
            kind, _, repo = folder.name.partition("--")
            if kind == "models" and (snapshot := _snapshot(folder)):
                yield repo.replace("--", "/", 1), snapshot, "hub cache"
        for store in self.lm_studio:
            for folder in _folders(store):
                yield _last_two(folder), folder, "lm studio"

    def all(self) -> Iterator[StoredModel]:
        """Yield every model that is here and whole."""
        for name, entry in SHORT_NAMES.items():
            file = self.home / "models" / entry.file_name
            if entry.is_folder and _is_whole_directory(file):
                yield _directory_place(name, file, "ridgeline")
            elif not entry.is_folder and file.is_file():
                yield StoredModel(name, file, (file,), "ridgeline", entry.sampling)
        for repo, folder, owner in self.repositories():
            yield from _in_folder(repo, folder, owner)
        yield from self.of_ollama()

    def find_repository(self, name: HubName, budget_bytes: int) -> tuple[StoredModel, str] | None:
        """Return the model of a hub name, and why it is that one; None if it is not here.

        Raises ValueError if several are, and none fits into ``budget_bytes`` of memory.
        """
        for repo, folder, owner in (*self.repositories(), *self._revision(name)):
            if repo.lower() != name.folder.lower():
                continue
            if not name.tag and _is_whole_directory(folder):
                return _directory_place(repo, folder, owner), ""
            models = gguf_models(_gguf_sizes(folder))
            wanted = [name.tag.upper(), name.tag]
            if models and (
                not name.tag
                or any(m.tag in wanted or Path(m.files[0]).name == name.tag for m in models)
            ):
                model, why = pick(models, name.tag, budget_bytes)
                files = tuple(folder / file for file in model.files)
                tag = names_of(models)[models.index(model)]
                return StoredModel(f"{repo}:{tag}", files[0], files, owner, {}), why
        return None

    def _revision(self, name: HubName) -> Iterator[tuple[str, Path, str]]:
        """Yield what the hub's cache has of a revision: its refs name commits, or it is one."""
        folder = self.hub_cache / f"models--{name.repo.replace('/', '--')}"
        commit = _commit(folder, name.revision) or name.revision
        if name.revision and (snapshot := folder / "snapshots" / commit).is_dir():
            yield name.folder, snapshot, "hub cache"

    # --- Ollama --------------------------------------------------------------------------------

    def of_ollama(self) -> Iterator[StoredModel]:
        """Yield what Ollama has pulled; what cannot be read becomes a problem.

        Of two with one name it is the first, the user's own.
        """
        names = set[str]()
        for store in self.ollama:
            for file in _files_below(store / "manifests"):
                name = _ollama_name(file.relative_to(store / "manifests").parts)
                if name in names:
                    continue
                try:
                    place = _ollama_place(name, store, file)
                except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                    reason = " ".join(str(error).split())[:240] or type(error).__name__
                    self.problems.append(f"{name}: its manifest {file} cannot be used ({reason})")
                    continue
                names.add(name)
                yield place

    def find_ollama(self, name: str) -> StoredModel | None:
        """Return what Ollama has under ``name``, with or without ``ollama:`` and a tag."""
        wanted = "ollama:" + name.removeprefix("ollama:")
        for place in self.of_ollama():
            if place.name in (wanted, f"{wanted}:latest"):
                return place
        return None


def _ollama_name(parts: Sequence[str]) -> str:
    """Return the name of a model by the path of its manifest."""
    *owners, name, tag = parts
    if owners[:1] == [_OLLAMA_HOST]:
        owners = owners[1:]
    if owners == [_OLLAMA_OWNER]:
        owners = []
    return f"ollama:{'/'.join((*owners, name))}:{tag}"


def _ollama_place(name: str, store: Path, manifest: Path) -> StoredModel:
    layers = {layer["mediaType"]: layer["digest"] for layer in _json(manifest)["layers"]}
    if _OLLAMA_MODEL not in layers:
        raise ValueError("it names no model file")
    blob = _blob(store, layers[_OLLAMA_MODEL])
    if _OLLAMA_ADAPTER in layers:
        adapter = _blob(store, layers[_OLLAMA_ADAPTER]).name
        raise ValueError(f"it has an adapter: serve {blob.name} with --lora NAME={adapter}")
    parameters = _json(_blob(store, layers[_OLLAMA_PARAMS])) if _OLLAMA_PARAMS in layers else {}
    sampling = {
        ours: parameters[theirs] for theirs, ours in _OLLAMA_NAMES.items() if theirs in parameters
    }
    return StoredModel(name, blob, (blob,), "ollama", sampling)


def _blob(store: Path, digest: str) -> Path:
    match = _DIGEST.fullmatch(digest)
    if match is None:  # it may hold "../"
        raise ValueError(f"{digest!r:.80} is not a sha256 digest")
    blob = store / "blobs" / f"sha256-{match[1]}"
    if not blob.is_file():
        raise ValueError(f"{blob.name} is missing")
    return blob


def _files_below(folder: Path) -> list[Path]:
    """Return the files in the folders of a folder, sorted; none if they are another user's."""
    try:
        return sorted(path for path in folder.glob("*/**/*") if path.is_file())
    except OSError:
        return []


def _json(file: Path, most_bytes: int = _MOST_MANIFEST_BYTES) -> dict[str, Any]:
    if file.stat().st_size > most_bytes:
        raise ValueError("it is too large")
    try:
        document = json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return document


def _listed(folder: Path) -> list[Path]:
    """Return what is in a folder, sorted; nothing if it cannot be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _folders(store: Path) -> Iterator[Path]:
    """Yield the folders ``owner/name`` of a store."""
    for owner in _listed(store):
        for folder in _listed(owner) if owner.is_dir() else ():
            if folder.is_dir() and not folder.name.startswith(".") and owner.name[0] != ".":
                yield folder


def _last_two(folder: Path) -> str:
    return "/".join(folder.parts[-2:])


def _snapshot(folder: Path) -> Path | None:
    """Return the main snapshot in a repository of the hub's cache; the only one if none is main."""
    commit = _commit(folder, "main")
    snapshot = folder / "snapshots" / commit
    if not commit:
        snapshots = _listed(folder / "snapshots")
        if len(snapshots) != 1:
            return None
        snapshot = snapshots[0]
    return snapshot if snapshot.is_dir() else None


def _commit(folder: Path, revision: str) -> str:
    """Return the commit that a ref of a repository in the hub's cache names; "" if none does."""
    try:
        commit = (folder / "refs" / revision).read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
    return commit if _COMMIT.fullmatch(commit) else ""


def _is_whole_directory(folder: Path) -> bool:
    """Whether a folder holds a safetensors model of which no file is missing."""
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return True
    try:
        names = {str(name) for name in _json(index, _MOST_INDEX_BYTES)["weight_map"].values()}
        return all((folder / name).is_file() for name in names)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return True  # what is wrong with it is said when it is loaded


def _gguf_sizes(folder: Path) -> dict[str, int]:
    """Return the whole GGUF files in a folder, by their paths in it, with their bytes."""
    files = (file for file in folder.glob("**/*.gguf") if file.is_file())
    return {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in files
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    }


def _directory_place(repo: str, folder: Path, owner: str) -> StoredModel:
    files = tuple(file for file in _listed(folder) if file.is_file())
    return StoredModel(repo, folder, files, owner, {})


def _in_folder(repo: str, folder: Path, owner: str) -> Iterator[StoredModel]:
    if _is_whole_directory(folder):
        yield _directory_place(repo, folder, owner)
    models = gguf_models(_gguf_sizes(folder))
    for model, tag in zip(models, names_of(models), strict=True):
        files = tuple(folder / file for file in model.files)
        yield StoredModel(f"{repo}:{tag}", files[0], files, owner, {})
