"""``GET /v1/audit/head``: where the audit log ends, to be kept elsewhere."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from ridgeline.serve.http.gate import check_operator
from ridgeline.trust.audit.log import AuditLog


def add_audit(app: FastAPI, log: AuditLog) -> None:
    """Add the route."""

    @app.get("/v1/audit/head")
    async def head(request: Request) -> dict[str, Any]:
        """Return the number and the hash of the audit log's last line on the disk.

        For operators.
        """
        check_operator(request.state)
        return log.head()
