"""``ridgeline ps``: which models a server has loaded, and what they do."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ridgeline.system.report import Table, gb
from ridgeline.system.terminal import console, drawn

_TIMEOUT_S = 10.0

# What commands about a running server are told.
URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(help="Address of the server.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="RIDGELINE_API_KEY", help="API key, if the server needs one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def ps(url: Url = URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show the models of a running server: what is loaded, in use, and until when."""
    models = ask_server(url, "/v1/models", "data", api_key)
    if as_json:
        print(json.dumps(models))
        return
    heads = ("model", "state", "in use", "requests", "unloaded in")
    rows = [_row(model["id"], model.get("status", {})) for model in models]
    console().print(drawn(Table(heads, rows, "lllll")))


def ask_server(url: str, path: str, field: str, api_key: str | None) -> Any:
    """Return a field of the JSON document that a server has at a path.

    Raises ValueError if it cannot be had.
    """
    import httpx2  # here: a tenth of a second that no other command needs

    url = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx2.get(url + path, headers=headers, timeout=_TIMEOUT_S)
        if answer.status_code == 401:
            raise ValueError(f"{url} needs a key: give --api-key")
        if answer.status_code == 403:
            raise ValueError(
                f"{url} shows {path} to operators only: give an operator's key with --api-key"
            )
        if answer.status_code == 404:
            raise ValueError(
                f"{url} has no {path}: it is a single server (start it with --replicas), or not "
                "Ridgeline: check --url"
            )
        return answer.raise_for_status().json()[field]
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        why = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in why:  # httpx2 keeps OpenSSL's error as text alone
            raise ValueError(
                f"the certificate of {url} is not trusted ({why}): set SSL_CERT_FILE to a file "
                "with the certificate, or with that of the authority that signed it"
            ) from error
        raise ValueError(f"no server answers at {url} ({why}): give its --url") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{url}{path} cannot be read ({why}): check --url, and that the server is running"
        ) from error


def _row(name: str, status: dict[str, Any]) -> tuple[str, ...]:
    size = status.get("resident_bytes")
    in_use = "-" if size is None else gb(size)
    requests = str(status.get("num_requests", "-"))
    return name, status.get("value", "-"), in_use, requests, _time(status)


def _time(status: dict[str, Any]) -> str:
    if status.get("value") == "hung":
        return "it hangs"
    if status.get("value") not in ("loaded", "asleep"):
        return "-"
    left_s = status.get("unload_s")
    if left_s is None:
        return "-" if status.get("num_requests") else "never"
    return f"{left_s:.0f} s"
