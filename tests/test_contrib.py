"""Files for other programs: they keep to those programs' forms, and name flags that there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import typer.main
import yaml

from ridgeline.cli.main import app

_KUBERNETES = Path(__file__).parents[1] / "contrib" / "kubernetes" / "raycluster.yaml"
_WHOLE = {"type": "integer", "minimum": 0}
_START = {"type": "object", "additionalProperties": {"type": "string"}}
_POD = {
    "type": "object",
    "required": ["spec"],
    "properties": {"spec": {"type": "object", "required": ["containers"]}},
}


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


# What KubeRay's API (ray.io/v1) says of the fields that are used here; others would be dropped.
_RAY_CLUSTER = _closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata={"type": "object", "required": ["name"]},
    spec=_closed(
        ["headGroupSpec"],
        rayVersion={"type": "string"},
        enableInTreeAutoscaling={"type": "boolean"},
        autoscalerOptions=_closed([], image={"type": "string"}, idleTimeoutSeconds=_WHOLE),
        headGroupSpec=_closed(["template"], rayStartParams=_START, template=_POD),
        workerGroupSpecs={
            "type": "array",
            "items": _closed(
                ["groupName", "template"],
                groupName={"type": "string"},
                replicas=_WHOLE,
                minReplicas=_WHOLE,
                maxReplicas=_WHOLE,
                rayStartParams=_START,
                template=_POD,
            ),
        },
    ),
)


def test_the_example_for_kubernetes_fits_its_form_and_names_flags_that_there_are() -> None:
    cluster, service = yaml.safe_load_all(_KUBERNETES.read_text())
    jsonschema.validate(cluster, _RAY_CLUSTER)
    head, router = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    (group,) = cluster["spec"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    command, _, *flags = router["args"]
    serve = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    known = {name for one in serve.params for name in one.opts}
    given = dict(flag.partition("=")[::2] for flag in flags)
    assert set(given) <= known
    assert given["--replicas"] == f"{group['minReplicas']}..{group['maxReplicas']}"
    assert given["--threads"] == worker["resources"]["requests"]["cpu"]
    assert head["volumeMounts"] == router["volumeMounts"][:2], "the router finds Ray's processes"
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    (mount,) = [one for one in router["volumeMounts"] if one["name"] == "fleet"]
    assert given["--fleet-key-file"].startswith(mount["mountPath"])
