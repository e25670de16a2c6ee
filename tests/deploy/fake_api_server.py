"""An API server of Kubernetes that knows a few objects, for a real kubectl to read."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    """

    def __init__(self, objects, logs=None):
        self.objects = {place: list(each) for place, each in objects.items()}
        self.logs = dict(logs or {})
        self.address = ""

    def answer(self, path):
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
                {"name": plural, "namespaced": plural != "nodes", "kind": kind, "verbs": ["get", "list"]}
                for plural, kind in _KINDS[version].items()
            ]
            return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        if rest[0] == "namespaces":
            rest = rest[2:]
        plural, *name = rest
        there = self.objects.get(f"{version}/{plural}", [])
        if not name:
            selector = parse_qs(url.query).get("labelSelector", [""])[0]
            items = [each for each in there if _selected(each, selector)]
            kind = f"{_KINDS[version][plural]}List"
            return 200, {"kind": kind, "apiVersion": version, "metadata": {}, "items": items}
        found = [each for each in there if each["metadata"]["name"] == name[0]]
        if not found:
            return 404, {
                "kind": "Status",
                "status": "Failure",
                "reason": "NotFound",
                "code": 404,
                "message": "NotFound",
            }
        if name[1:] == ["log"]:
            return (200, self.logs[name[0]]) if name[0] in self.logs else (404, {})
        return 200, found[0]


def _selected(document, selector):
    labels = document["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


@contextmanager
def serving(server):
    """Serve on a free port of this host while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, document = server.answer(self.path)
            text = document if isinstance(document, str) else json.dumps(document)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(document, str) else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            """Say nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.address = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
