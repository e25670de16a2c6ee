"""An API server of Kubernetes that knows a few objects: a real kubectl can read them, and a script delete them."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_KINDS = {
    "v1": {"pods": "Pod", "services": "Service", "nodes": "Node"},
    "batch/v1": {"jobs": "Job"},
}


class ApiServer:
    """The objects that are there, and what was asked.

    Attributes:
        objects: by apiVersion and plural, such as ``batch/v1/jobs``.
        logs: name of a pod -> its log.
        deleted: paths, without the namespace, in their order.
        tokens: what callers have shown.
        refuse: plurals of which nothing may be done.
    """

    def __init__(
        self, objects: Mapping[str, Sequence[Mapping[str, Any]]], logs: Mapping[str, str] | None = None
    ) -> None:
        self.objects = {place: list(each) for place, each in objects.items()}
        self.logs = dict(logs or {})
        self.deleted: list[str] = []
        self.tokens: list[str] = []
        self.refuse: set[str] = set()
        self.address = ""

    def answer(self, method: str, path: str) -> tuple[int, Any]:
        """Return the status and the document of a request."""
        url = urlsplit(path)
        parts = [part for part in url.path.split("/") if part]
        if parts == ["api"]:
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if parts == ["apis"]:
            version = {"groupVersion": "batch/v1", "version": "v1"}
            group = {"name": "batch", "versions": [version], "preferredVersion": version}
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
        version, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        if version not in _KINDS:
            return 404, {}
        if not rest:
            resources = [
                {"name": plural, "namespaced": plural != "nodes", "kind": kind, "verbs": ["get", "list", "delete"]}
                for plural, kind in _KINDS[version].items()
            ]
            return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        if rest[0] == "namespaces":
            rest = rest[2:]
        plural, *name = rest
        if plural in self.refuse:
            return 403, _failure(403, "Forbidden")
        there = self.objects.get(f"{version}/{plural}", [])
        if not name:
            selector = parse_qs(url.query).get("labelSelector", [""])[0]
            items = [each for each in there if _selected(each, selector)]
            kind = f"{_KINDS[version][plural]}List"
            return 200, {"kind": kind, "apiVersion": version, "metadata": {}, "items": items}
        found = [each for each in there if each["metadata"]["name"] == name[0]]
        if not found:
            return 404, _failure(404, "NotFound")
        if name[1:] == ["log"]:
            return (200, self.logs[name[0]]) if name[0] in self.logs else (404, {})
        if method == "DELETE":
            there.remove(found[0])
            self.deleted.append(f"{version}/{plural}/{name[0]}?{url.query}")
        return 200, found[0]


def _failure(code: int, reason: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "reason": reason, "code": code, "message": reason}


def _selected(document: Mapping[str, Any], selector: str) -> bool:
    labels = document["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


@contextmanager
def serving(server: ApiServer, certificate: Path | None = None) -> Iterator[ApiServer]:
    """Serve on a free port of this host while the block runs; with a certificate (and its key in one file), by TLS."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            server.tokens.append(self.headers.get("Authorization", ""))
            status, document = server.answer(self.command, self.path)
            text = document if isinstance(document, str) else json.dumps(document)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(document, str) else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_DELETE = _do

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        http.socket = context.wrap_socket(http.socket, server_side=True)
    server.address = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
