"""``ridgeline ps``, against real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli.commands.fleet import fleet
from ridgeline.cli.commands.ps import ps
from tests.serve.http.test_listening import pems  # noqa: F401  (a fixture)
from tests.serve.serving import serving


def test_it_shows_what_a_server_has(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(model) as served:
        for path in ("", "/", "/v1"):
            ps(f"http://127.0.0.1:{served.port}{path}")
            head, row = capsys.readouterr().out.splitlines()
            assert head.split()[:2] == ["model", "state"]
            assert row.split()[:2] == ["tiny", "loaded"]
        ps(f"http://127.0.0.1:{served.port}", as_json=True)
        (one,) = json.loads(capsys.readouterr().out)
        assert one["id"] == "tiny"


def test_a_server_with_keys_asks_for_one(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(model, api_key=["secret"]) as served:
        url = f"http://127.0.0.1:{served.port}"
        with pytest.raises(ValueError, match=f"{url} needs a key: give --api-key"):
            ps(url)
        ps(url, api_key="secret")
        assert "tiny" in capsys.readouterr().out


def test_one_server_is_no_fleet(model: Path) -> None:
    with serving(model) as served, pytest.raises(ValueError, match="has no /v1/fleet"):
        fleet(f"http://127.0.0.1:{served.port}")


def test_where_no_server_is_the_address_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"no server answers at http://127.0.0.1:1 .*: give its"):
        ps("http://127.0.0.1:1")


def test_a_certificate_that_nobody_signed_can_be_trusted(
    model: Path,
    pems: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {"ssl_certfile": pems / "cert.pem", "ssl_keyfile": pems / "key.pem"}
    with serving(model, **files) as served:
        url = f"https://localhost:{served.port}"
        message = f"certificate of {url} is not trusted .*: set SSL_CERT_FILE"
        with pytest.raises(ValueError, match=message):
            ps(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(pems / "cert.pem"))
        ps(url)
        assert "tiny" in capsys.readouterr().out
