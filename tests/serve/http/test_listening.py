"""Behind a proxy and without one: names, prefixes, certificates, Unix sockets."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ridgeline.serve.http.listening import bind_unix, certificate_settings, unbound
from ridgeline.serve.http.options import ServeOptions
from tests.serve.serving import serving
from tests.serve.test_main import process
from tests.waiting import PATIENCE_S, connected

ASK = json.dumps({"prompt": [40, 41], "max_tokens": 3})
HEADERS = {"content-type": "application/json"}


def status_of(port: int, host: str, **headers: str) -> tuple[int, Any]:
    with connected(port) as connection:
        connection.putrequest("GET", "/v1/models", skip_host=True)
        for name, value in {"host": host, **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, json.loads(response.read())


# --- names ----------------------------------------------------------------------------------------


def test_a_proxys_name_is_allowed_by_a_flag(model: Path) -> None:
    names = ["chat.example.org", "*.example.net"]
    with serving(model, allowed_host=names) as served:
        for host in ("127.0.0.1", "localhost:80", "chat.example.org", "Chat.Example.org:443",
                     "a.example.net", "a.b.example.net"):  # fmt: skip
            assert status_of(served.port, host)[0] == 200, host
        for host in ("example.org", "x.chat.example.org", "example.net", "evilexample.net", ""):
            status, body = status_of(served.port, host)
            assert status == 403, host
            assert "see --allowed-host" in body["error"]["message"]
        origin = "https://chat.example.org"
        assert status_of(served.port, "chat.example.org", origin=origin)[0] == 200


def test_any_name_may_be_allowed(model: Path) -> None:
    with serving(model, allowed_host=["*"]) as served:
        assert status_of(served.port, "whatever")[0] == 200


@pytest.mark.parametrize(
    "flags",
    [
        {"allowed_host": ["http://x"]}, {"allowed_host": ["a b"]}, {"allowed_host": ["*x"]},
        {"root_path": "llm"}, {"root_path": "/llm/"}, {"root_path": "/a?b"},
        {"ssl_keyfile": Path("key.pem")}, {"ssl_keyfile_password": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_flags_that_make_no_sense_are_named(flags: dict[str, Any]) -> None:
    (name,) = flags
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
        ServeOptions(**flags)


# --- a prefix -------------------------------------------------------------------------------------


def test_a_prefix_may_be_there_or_stripped(model: Path) -> None:
    with serving(model, root_path="/llm") as served:
        for prefix in ("", "/llm"):
            answer = served.call(f"{prefix}/v1/completions", json.loads(ASK))
            assert answer[0] == 200
            assert served.call(f"{prefix}/", None, "GET")[0] == 200
        assert served.call("/llmx/v1/models", None, "GET")[0] == 404
        assert served.call("/llm/llm/v1/models", None, "GET")[0] == 404
        document = served.call("/openapi.json", None, "GET")[1]
        assert document["servers"] == [{"url": "/llm"}]


# --- certificates ---------------------------------------------------------------------------------


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def certificate(folder: Path) -> None:
    """Write cert.pem and key.pem, of this machine."""
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", 2, *subject,
            "-keyout", folder / "key.pem", "-out", folder / "cert.pem")  # fmt: skip


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cert.pem with key.pem, another key, and key.pem encrypted as locked.pem."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed: it makes the certificates")
    folder = tmp_path_factory.mktemp("pems")
    certificate(folder)
    openssl("genrsa", "-out", folder / "other.pem", 2048)
    openssl("rsa", "-in", folder / "key.pem", "-aes256", "-passout", "pass:word",
            "-out", folder / "locked.pem")  # fmt: skip
    both = (folder / "cert.pem").read_text() + (folder / "key.pem").read_text()
    (folder / "both.pem").write_text(both)
    return folder


@pytest.mark.parametrize(
    "flags",
    [
        {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"},
        {"ssl_certfile": "both.pem"},
        {"ssl_certfile": "cert.pem", "ssl_keyfile": "locked.pem", "ssl_keyfile_password": "word"},
    ],
    ids=str,
)
def test_https(model: Path, pems: Path, flags: dict[str, str]) -> None:
    options: dict[str, Any] = {
        name: value if name.endswith("password") else pems / value for name, value in flags.items()
    }
    context = ssl.create_default_context(cafile=str(pems / "cert.pem"))
    with serving(model, **options) as served:
        connection = http.client.HTTPSConnection("localhost", served.port, context=context)
        for _ in range(2):
            connection.request("POST", "/v1/completions", ASK, HEADERS)
            answer = json.loads(connection.getresponse().read())
            assert answer["usage"]["completion_tokens"] == 3
        connection.request("POST", "/v1/completions", ASK[:-1] + ', "stream": true}', HEADERS)
        assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
        connection.close()
        with pytest.raises(OSError):  # noqa: PT011  (whatever the system calls it)
            status_of(served.port, "localhost")


@pytest.mark.parametrize(
    ("cert", "key", "password", "message"),
    [
        (
            "cert.pem",
            "other.pem",
            None,
            "other.pem does not belong to the certificate in .*cert",
        ),
        ("none.pem", "key.pem", None, "there is no file .*none.pem"),
        ("cert.pem", "none.pem", None, "there is no file .*none.pem"),
        ("cert.pem", "locked.pem", None, "password is needed: the key is encrypted .*locked.pem"),
        ("cert.pem", "locked.pem", "wrong", "--ssl-keyfile-password is wrong .*locked.pem"),
        ("key.pem", "key.pem", None, "are not a certificate and its key in PEM form"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_else(
    pems: Path, cert: str, key: str, password: str | None, message: str
) -> None:
    options = ServeOptions(
        ssl_certfile=pems / cert, ssl_keyfile=pems / key, ssl_keyfile_password=password
    )
    with pytest.raises(ValueError, match=message):
        certificate_settings(options)


# --- Unix sockets ---------------------------------------------------------------------------------


class UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


def test_a_server_on_a_unix_socket(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "ridgeline.sock"
    with process(model, "--uds", str(path)) as (server, url):
        assert url == f"http+unix:{path}"
        connection = UnixConnection(str(path))
        connection.request("POST", "/v1/completions", ASK, HEADERS | {"host": "anything"})
        assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 3
        connection.close()
        with pytest.raises(OSError, match="another server listens"):
            bind_unix(path)
        server.terminate()
        assert server.wait(PATIENCE_S) == 0
    assert not path.exists()


def test_a_stale_socket_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bind_unix(path).close()  # the file stays, as after a crash
    with unbound(bind_unix(path)):
        assert path.exists()
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(OSError, match="it exists and is not a socket"):
        bind_unix(path)
    with pytest.raises(OSError, match="name another --uds"):
        bind_unix(tmp_path / "no" / "folder")
    assert path.read_text() == "precious"


def test_a_server_without_pages(model: Path) -> None:
    with serving(model, page=False) as served:
        for path in ("/", "/plan", "/page/page.js"):
            assert served.call(path, None, "GET")[0] == 404, path
        assert served.call("/v1/models", None, "GET")[0] == 200
