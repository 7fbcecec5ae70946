"""The flags of a router, as the processes of its models get them."""

from __future__ import annotations

from dataclasses import fields

from ridgeline.engine_setup.options import Options
from ridgeline.server.http.options import ServeOptions

_OF_ROUTER = (  # flags that are not for its models, which only it can reach
    *("host", "port", "grpc_port", "uds", "allowed_host", "root_path", "page", "cors_origin"),
    *("shutdown_timeout",),
    *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
    *("models_dir", "models_memory", "keep_alive", "replicas", "silence_timeout"),
    *("place", "ray", "target_requests"),
    *("join", "fleet_key_file", "fleet_ca", "fleet_plain"),
    *("max_requests_per_minute", "max_concurrent_requests"),  # counted over all models
)


def as_variables(engine: Options, serving: ServeOptions) -> dict[str, str]:
    """Return the flags of each model as environment variables, without what is left as it was."""
    variables = {"RIDGELINE_SHUTDOWN_TIMEOUT": "0"}  # it is ended when its requests have
    for options in (engine, serving):
        for flag in fields(options):
            value = getattr(options, flag.name)
            if flag.name == "max_tokens_per_minute" and value is not None:
                value = max(
                    1, value // serving.num_replicas
                )  # a server without its part asks the next
            if flag.name not in _OF_ROUTER and value not in (None, flag.default):
                text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
                variables[f"RIDGELINE_{flag.name.upper()}"] = text
    return variables
