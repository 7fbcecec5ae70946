"""The web page: its files, read once, with headers that let them load nothing from elsewhere."""

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.responses import Response

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
    **dict.fromkeys(("js", "mjs"), "text/javascript"),
}
_VENDOR = "/page/vendor/"  # libraries of others, whose paths have their versions
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}

_PATHS = {"/page/index.html": "/", "/page/plan.html": "/plan"}


def _below(folder: Traversable, path: str) -> Iterator[tuple[str, Traversable]]:
    """Yield each file below a folder that pages load, with its path."""
    for entry in folder.iterdir():
        inner = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _below(entry, inner)
        elif inner.rpartition(".")[2] in _TYPES:
            yield _PATHS.get(inner, inner), entry


def _response(path: str, file: Traversable) -> Response:
    caching = "public, max-age=31536000, immutable" if path.startswith(_VENDOR) else "no-cache"
    kind = _TYPES[file.name.rpartition(".")[2]]
    return Response(file.read_bytes(), 200, _HEADERS | {"cache-control": caching}, kind)


FILES = {  # by path
    path: _response(path, file)
    for path, file in _below(files("ridgeline.serve").joinpath("page"), "/page")
}
