"""A local storage server that replaces Google's in tests of gs:// paths.

It implements the part of the JSON API (cloud.google.com/storage/docs/json_api/v1) that gcsfs, google.cloud.storage and
tensorstore use: objects with generations, conditional writes, ranges, resumable uploads and listings. Environment
variables tell the libraries where the server is.
"""

import contextlib
import http.server
import itertools
import json
import os
import re
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs, unquote, urlsplit

NAME = "tests"
TIME = "2026-01-01T00:00:00.000Z"
Answer = tuple[int, dict[str, str], bytes]  # status, headers, content


class Bucket:
    """Objects by name, each with the generation of its last write."""

    url = f"gs://{NAME}"

    def __init__(self):
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.uploads: dict[str, tuple[str, bytes]] = {}  # id of a resumable upload -> name, content so far
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        self.holding, self.held, self._released = None, threading.Event(), threading.Event()

    @contextlib.contextmanager
    def hold(self, fragment: str) -> Iterator[None]:
        """Delays writes of objects with `fragment` in their names while the block lasts; sets `held` when one waits."""
        self.holding = fragment
        try:
            yield
        finally:
            self.holding = None
            self._released.set()

    def pass_write(self, name: str) -> None:
        """Waits if writes of this name are delayed."""
        if self.holding is not None and self.holding in name:
            self.held.set()
            self._released.wait()


class Refused(Exception):
    """The HTTP status of an answer that is not a success."""


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Logs nothing."""

    def handle(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has closed the connection
            super().handle()

    def _serve(self) -> None:
        self.bucket: Bucket = self.server.bucket
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if self.command == "POST":
            self.bucket.pass_write(unquote(self.path))
        with self.bucket.lock:
            status, headers, content = self._answer(self.command, url.path)
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = _serve

    def _answer(self, method: str, path: str) -> Answer:
        for verb, pattern, answer in ROUTES:
            if method == verb and (match := re.fullmatch(pattern, path)):
                try:
                    return answer(self, *map(unquote, match.groups()))
                except Refused as refusal:
                    status = refusal.args[0]
                    return (status, {}, b"") if status == 304 else as_json({"error": {"code": status}}, status=status)
        status, text = (400, "not in tests/helpers/bucket.py") if f"/b/{NAME}" in path else (404, "no such bucket")
        return as_json({"error": {"code": status, "message": f"{text}: {method} {path}"}}, status=status)

    def _find(self, name: str) -> tuple[bytes, int]:
        """Returns an object and its generation, if it exists and the conditions of the request hold."""
        content, generation = self._check(name)
        if not generation:
            raise Refused(404)
        if self.query.get("ifGenerationNotMatch") == str(generation):
            raise Refused(304)
        return content, generation

    def _check(self, name: str) -> tuple[bytes, int]:
        """Returns an object and its generation; generation 0 if it does not exist."""
        found = self.bucket.objects.get(name, (b"", 0))
        if self.query.get("ifGenerationMatch", str(found[1])) != str(found[1]):
            raise Refused(412)
        return found

    def _write(self, name: str, content: bytes) -> dict:
        self.bucket.objects[name] = content, next(self.bucket.numbers)
        return self._about(name)

    def _about(self, name: str) -> dict:
        content, generation = self.bucket.objects[name]
        return {
            "kind": "storage#object",
            "bucket": NAME,
            "name": name,
            "size": str(len(content)),
            "storageClass": "STANDARD",
            "generation": str(generation),
            "metageneration": "1",
            "timeCreated": TIME,
            "updated": TIME,
        }

    def about_bucket(self) -> Answer:
        return as_json({"kind": "storage#bucket", "id": NAME, "name": NAME})

    def listing(self) -> Answer:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        items, folders = [], {}
        for name in sorted(self.bucket.objects):
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and delimiter and delimiter in rest:
                folders[prefix + rest.partition(delimiter)[0] + delimiter] = None
            elif name.startswith(prefix):
                items.append(self._about(name))
        return as_json({"kind": "storage#objects", "items": items, "prefixes": list(folders)})

    def read(self, name: str) -> Answer:
        content, generation = self._find(name)
        if self.query.get("alt") != "media":
            return as_json(self._about(name))
        headers = {"x-goog-generation": str(generation)}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return 200, headers, content
        size, (first, last) = len(content), wanted.groups()
        first, last = (int(first), min(int(last or size), size - 1)) if first else (max(0, size - int(last)), size - 1)
        if first > last:
            raise Refused(416)
        return 206, headers | {"Content-Range": f"bytes {first}-{last}/{size}"}, content[first : last + 1]

    def delete(self, name: str) -> Answer:
        self._find(name)
        del self.bucket.objects[name]
        return 204, {}, b""

    def move(self, source: str, target: str) -> Answer:
        about = self._write(target, self._find(source)[0])
        del self.bucket.objects[source]
        return as_json(about)

    def upload(self) -> Answer:
        if key := self.query.get("upload_id"):
            return self._go_on(key)
        if self.query["uploadType"] == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
            about, content = (part.partition(b"\n\n")[2][:-1] for part in self.body.split(b"--" + boundary)[1:-1])
            return as_json(self._write(json.loads(about)["name"], content))
        self._check(self.query["name"])
        if self.query["uploadType"] == "media":
            return as_json(self._write(self.query["name"], self.body))
        key = str(next(self.bucket.numbers))
        self.bucket.uploads[key] = self.query["name"], b""
        return 200, {"Location": f"http://{self.headers['Host']}{self.path}&upload_id={key}"}, b""

    def _go_on(self, key: str) -> Answer:
        """Appends to a resumable upload; the part that states the total size is the last one."""
        name, content = self.bucket.uploads[key]
        content += self.body
        self.bucket.uploads[key] = name, content
        if self.headers["Content-Range"].endswith("/*"):
            return 308, {"Range": f"bytes=0-{len(content) - 1}"}, b""
        return as_json(self._write(name, content))

    def batch(self) -> Answer:
        """Deletes several objects in one request."""
        paths = re.findall(r"\nDELETE (\S+)", self.body.decode())
        answers = [f"--together\n\nHTTP/1.1 {self._answer('DELETE', path)[0]}\n" for path in paths]
        kind = {"Content-Type": "multipart/mixed; boundary=together"}
        return 200, kind, "".join([*answers, "--together--"]).encode()


def as_json(value: dict, *, status: int = 200) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


OBJECTS = f"/storage/v1/b/{NAME}/o"
ROUTES = [
    ("GET", f"/storage/v1/b/{NAME}", Handler.about_bucket),
    ("GET", OBJECTS, Handler.listing),
    ("GET", rf"(?:/download)?{OBJECTS}/([^/]+)", Handler.read),
    ("DELETE", rf"{OBJECTS}/([^/]+)", Handler.delete),
    ("POST", rf"{OBJECTS}/([^/]+)/moveTo/o/([^/]+)", Handler.move),
    ("POST", f"/upload{OBJECTS}", Handler.upload),
    ("PUT", f"/upload{OBJECTS}", Handler.upload),
    ("POST", "/batch/storage/v1", Handler.batch),
]


@contextlib.contextmanager
def serving() -> Iterator[Bucket]:
    """Serves an empty bucket to this process and its children."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bucket = Bucket()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    variables = {
        "STORAGE_EMULATOR_HOST": url,  # for gcsfs and google.cloud.storage
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # otherwise gcsfs asks for the kind of bucket by gRPC
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "GOOGLE_CLOUD_PROJECT": "none",
        "NO_GCE_CHECK": "true",  # otherwise google.auth looks for a metadata server
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield server.bucket
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        server.shutdown()
