"""The web page: its files, read once, with headers that let them load nothing from elsewhere."""

from importlib.resources import files

from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}

_PATHS = {"index.html": "/", "plan.html": "/plan"}

FILES = {  # by path
    _PATHS.get(file.name, f"/page/{file.name}"): Response(
        file.read_bytes(), 200, _HEADERS, _TYPES[file.name.rpartition(".")[2]]
    )
    for file in files("ridgeline.server").joinpath("page").iterdir()
}
