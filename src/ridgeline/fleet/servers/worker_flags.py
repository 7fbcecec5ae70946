"""The flags of a router, as the processes of its models get them.

Flags that may be given several times are passed as arguments: a variable could not tell a space in
a name from the next name. They are not seen in a list of processes, since a server gets them once
it runs.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ridgeline.engine.setup.options import Options
from ridgeline.serve.http.options import ServeOptions
from ridgeline.system.machine import folder_name

_OF_ROUTER = (  # flags that are not for its models: only it can reach them, and it counts
    *("host", "port", "grpc_port", "uds", "allowed_host", "root_path", "page", "cors_origin"),
    *("max_requests_per_minute", "max_tokens_per_minute"),
    *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
    *("models_dir", "models_memory", "keep_alive", "replicas", "silence_timeout"),
    *("place", "ray", "target_requests"),
    *("join", "fleet_key_file", "fleet_ca", "fleet_plain", "max_concurrent_requests"),
)


def own_name(name: str, number: int) -> str:
    """Return what the files are called that a server of a model has for itself."""
    return f"{folder_name(name)}-{number}"


class WorkerFlags:
    """What a router's flags are for its servers."""

    def __init__(self, engine: Options, serving: ServeOptions) -> None:
        """Take the flags, without what is left as it was."""
        self._variables = dict[str, str]()
        self._arguments: list[str] = []
        self._num_servers, self._has_names = serving.num_replicas, bool(serving.served_model_name)
        self._trace, self._kv_disk, self._audit = engine.trace, engine.kv_disk_place, serving.audit
        for options in (engine, serving):
            for flag in fields(options):
                value = getattr(options, flag.name)
                if flag.name in _OF_ROUTER or value in (None, flag.default):
                    continue
                if isinstance(value, list):
                    name = flag.name.replace("_", "-")
                    self._arguments += [f"--{name}={one}" for one in value]
                else:
                    self._variables[f"RIDGELINE_{flag.name.upper()}"] = str(value)

    def arguments(self, name: str) -> list[str]:
        """Return the arguments for a server of a model that requests call ``name``."""
        own = [] if self._has_names else [f"--served-model-name={name}"]
        return [*self._arguments, *own]

    def variables(self, name: str, number: int, start: int) -> dict[str, str]:
        """Return the variables of a server; it writes files of its own alone.

        ``number`` is which server of its model it is, and ``start`` how often it was started
        before: a trace that has ended stays.
        """
        own = own_name(name, number)
        variables = dict(self._variables)
        if self._audit:
            variables["RIDGELINE_AUDIT"] = str(self._audit / own)
        if self._trace:
            path, again = Path(self._trace), f"-{start + 1}" if start else ""
            variables["RIDGELINE_TRACE"] = str(path.with_stem(f"{path.stem}-{own}{again}"))
        if self._kv_disk and self._num_servers > 1:  # one alone can write a folder
            folder, num_bytes = self._kv_disk
            own_bytes = max(1, num_bytes // self._num_servers)
            variables["RIDGELINE_KV_DISK"] = f"{folder / f'server-{number}'}:{own_bytes}"
        return variables
