"""Whether there is a gRPC port, and what serves it. It imports gRPC only where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from ridgeline.serve.http.listening import bind
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.web_server import WebServer


def check_grpc_port(options: ServeOptions) -> None:
    """Check what ``--grpc-port`` needs, before a model is loaded.

    Raises ValueError if gRPC is not installed or cannot have the certificate, and OSError if the
    port is taken.
    """
    if options.grpc_port is None:
        return
    try:
        import ridgeline.serve.triton_grpc.front  # noqa: F401
    except ImportError:
        raise ValueError("--grpc-port needs gRPC: pip install 'ridgeline[grpc]'") from None
    if options.ssl_keyfile_password:
        raise ValueError("--grpc-port cannot read a key with --ssl-keyfile-password: store it bare")
    bind(options.host, options.grpc_port, flag="--grpc-port").close()


@contextlib.asynccontextmanager
async def grpc_beside(web: WebServer, options: ServeOptions) -> AsyncIterator[str]:
    """Serve gRPC, if that is wanted, beside a web server for as long as the block lasts.

    Yield what is said of it.
    """
    if options.grpc_port is None:
        yield ""
        return
    from ridgeline.serve.triton_grpc.front import serving_grpc

    async with serving_grpc(web, options) as port:
        yield f"; Triton's gRPC: {options.host}:{port}"
