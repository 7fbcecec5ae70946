"""Where a Python package's wheel is: the user's package index is asked itself, without pip.

The index is named by pip's and uv's environment variables, then by pip's configuration files;
otherwise it is pip's own default. The result is only a place: the code that downloads from it knows
the hash.
"""

from __future__ import annotations

import base64
import configparser
import html.parser
import importlib.util
import json
import os
import re
import ssl
import sys
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import unquote, urljoin, urlsplit

from ridgeline.system.machine import users_home

_TIMEOUT_S = 30.0
_ACCEPT = (
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, "
    "text/html;q=0.1"
)
# The variables that give each setting; the first that is set counts.
_VARIABLES = {
    "index-url": ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": ("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "find-links": ("PIP_FIND_LINKS", "UV_FIND_LINKS"),
    "no-index": ("PIP_NO_INDEX", "UV_NO_INDEX"),
    "cert": ("PIP_CERT",),
    "proxy": ("PIP_PROXY",),
}


class IndexClient(NamedTuple):
    """How to reach servers.

    Attributes:
        cert: path of a bundle of certificate authorities; empty for the system's.
        proxy: URL of a proxy; empty for the system's.
    """

    cert: str = ""
    proxy: str = ""

    def open(self, url: str, headers: Mapping[str, str]) -> Any:
        """Open ``url``, which is ``file:`` or ``http(s):`` and may hold a name and a password.

        Raises OSError or http.client.HTTPException if it cannot be opened.
        """
        if self.cert and not Path(self.cert).exists():
            raise URLError(f"there is no file {self.cert} with certificates")
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler(
                {"http": self.proxy, "https": self.proxy} if self.proxy else None
            ),
            urllib.request.HTTPSHandler(
                context=ssl.create_default_context(cafile=self.cert or None)
            ),
        )
        all_headers = {"User-Agent": "ridgeline"} | dict(headers)
        secret = all_headers.pop("Authorization", "")
        if login := _login(url):
            secret = f"Basic {base64.b64encode(unquote(login).encode()).decode()}"
        request = urllib.request.Request(without_login(url), headers=all_headers)
        if secret:  # not sent on when redirected: no other server may see it
            request.add_unredirected_header("Authorization", secret)
        return opener.open(request, timeout=_TIMEOUT_S)


class IndexSource(NamedTuple):
    """A file to download, how to reach its server, and what to send it besides."""

    url: str
    network: IndexClient = IndexClient()
    headers: tuple[tuple[str, str], ...] = ()


class Settings(NamedTuple):
    """Where the user's packages come from.

    Attributes:
        indexes: URLs of package indexes, the user's extra ones first.
        find_links: directories, and URLs of directories and pages, with wheels.
        network: how to reach them.
    """

    indexes: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    network: IndexClient = IndexClient()


def _default_index() -> str:
    """Return the index that pip asks by default, as pip's source names it.

    If pip is not installed, the wheel of pip that Python brings is read instead. Raises ValueError
    if there is neither.
    """
    source = "pip/_internal/models/index.py"
    installed = importlib.util.find_spec("pip")
    ensurepip = importlib.util.find_spec("ensurepip")
    if installed and installed.origin:
        text = (Path(installed.origin).parents[1] / source).read_text(encoding="utf-8")
    elif ensurepip and ensurepip.origin:
        bundled = Path(ensurepip.origin).parent / "_bundled"
        text = "".join(
            zipfile.ZipFile(wheel).read(source).decode() for wheel in bundled.glob("pip-*.whl")
        )
    else:
        text = ""
    match = re.search(r'PyPI = PackageIndex\(\s*"([^"]+)"', text)
    if not match:
        raise ValueError("no package index is set: set PIP_INDEX_URL to the address of one")
    return urljoin(match[1], "simple")


def read_settings(
    environment: Mapping[str, str], config_files: Iterable[Path] | None = None
) -> Settings:
    """Return the settings of pip or uv.

    Args:
        environment: the process's variables.
        config_files: pip's configuration files, of which later ones win; None for the usual ones.
    """
    settings: dict[str, str] = {}
    for path in _config_files(environment) if config_files is None else config_files:
        settings |= _read_config(path)
    for name, variables in _VARIABLES.items():
        values = (environment[variable] for variable in variables if environment.get(variable))
        settings[name] = next(values, settings.get(name, ""))
    find_links = _urls(settings["find-links"])
    network = IndexClient(settings["cert"], settings["proxy"])
    if settings["no-index"].lower() in ("1", "true", "yes", "on", "y", "t"):
        return Settings((), find_links, network)
    index = settings["index-url"] or _default_index()
    return Settings((*_urls(settings["extra-index-url"]), *_urls(index)), find_links, network)


def _config_files(environment: Mapping[str, str]) -> list[Path]:
    """Return where pip looks for its configuration: the system's, the user's, this Python's."""
    own = environment.get("PIP_CONFIG_FILE")
    if own == os.devnull:  # pip's way to say: read none
        return []
    home = users_home() or Path("/nonexistent")
    system = environment.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    users = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    return [
        *(Path(directory) / "pip" / "pip.conf" for directory in system.split(":")),
        Path("/etc/pip.conf"),
        *([] if own else [home / ".pip" / "pip.conf", users / "pip" / "pip.conf"]),
        Path(sys.prefix) / "pip.conf",
        *([Path(own)] if own else []),
    ]


def _read_config(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path)  # a missing file is an empty one
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ValueError(f"pip's configuration {path} cannot be read ({error})") from error
    sections = [name for name in ("global", "install") if parser.has_section(name)]
    return {key: value for name in sections for key, value in parser.items(name)}


def _urls(text: str) -> tuple[str, ...]:
    """Split a list of URLs; uv separates some by commas, and allows ``name=`` before them."""
    return tuple(
        re.sub(r"^[\w.-]+=(?=\w+:)", "", word) for word in re.split(r"[\s,]+", text) if word
    )


def find_wheel(package: str, version: str, settings: Settings) -> IndexSource:
    """Return where the wheel of exactly this version is.

    Raises:
        ValueError: no index can be asked, or none has it; one line, with what each one said.
    """
    wheel = re.compile(re.escape(f"{package.replace('-', '_')}-{version}-") + r"[^/]+\.whl")
    pages = [f"{index.rstrip('/')}/{package}/" for index in settings.indexes]
    said = []
    for page in (*settings.find_links, *pages):
        try:
            for link in _links(page, settings.network):
                if wheel.fullmatch(unquote(urlsplit(link).path).rpartition("/")[2]):
                    return IndexSource(link, settings.network)
            said.append(f"{without_login(page)} does not have it")
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            said.append(f"{without_login(page)}: {' '.join(str(error).split()) or repr(error)}")
    raise ValueError(
        f"the wheel of {package} {version} was not found ({'; '.join(said) or 'no index is set'}): "
        f"check the network and the index settings (PIP_INDEX_URL, UV_INDEX_URL, pip.conf)"
    )


def _links(page: str, network: IndexClient) -> Iterator[str]:
    """Yield the URLs that a page or a directory lists. Raises the errors of reading it."""
    if not re.match(r"[a-z]+://", page):
        page = Path(page).expanduser().absolute().as_uri()
    if page.startswith("file:"):
        directory = Path(unquote(urlsplit(page).path))
        if directory.is_dir():
            if not (directory / "index.html").exists():
                yield from (path.as_uri() for path in sorted(directory.iterdir()))
                return
            page = (directory / "index.html").as_uri()
    with network.open(page, {"Accept": _ACCEPT}) as response:
        base, text = response.geturl(), response.read().decode()
        is_json = response.headers.get_content_type().endswith("json")
    login, host = _login(page), urlsplit(without_login(page)).netloc
    if is_json:
        links = [urljoin(base, file["url"]) for file in json.loads(text)["files"]]
    else:
        anchors = _Anchors()
        anchors.feed(text)
        links = [urljoin(urljoin(base, anchors.base), link) for link in anchors.links]
    for link in links:
        parts = urlsplit(link)._replace(fragment="")
        is_theirs = login and parts.netloc == host
        yield parts._replace(netloc=f"{login}@{host}").geturl() if is_theirs else parts.geturl()


class _Anchors(html.parser.HTMLParser):
    """The links of an index page (PEP 503)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if tag == "base" and target:
            self.base = target
        elif tag == "a" and target:
            self.links.append(target)


def without_login(url: str) -> str:
    """Return a URL without the name and the password that it may hold; messages show it so."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _login(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[0]
