"""Run test commands over snapshots of repositories, for the HTTP executor of envs/code/sandbox.py.

    python tools/executor_server.py --images snapshots --port 8002

    POST /test {"docker_image", "patch_tar_b64", "test_cmd", "timeout"}
        -> {"test_output", "exit_code", "elapsed_seconds", "container_id"}
    GET /health, GET /ping

An image's name stands for a folder of that name under --images (of "registry/name:tag", the part after the
last slash, with _ for what is no letter, digit, dot, dash or underscore). The archive's regular files are
laid over it, and `sh -c test_cmd` runs in a sandbox. Exit code 124: out of time. A bad request is answered
by 400 and one line; 429: more requests than --concurrency, try again. It listens on this machine only, and
anyone on it can use it. The first line printed is JSON with the address; --port 0 is a free one.
"""

from __future__ import annotations

import base64
import http.server
import io
import json
import math
import re
import sys
import tarfile
import threading
import uuid
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput
from envs.code import sandbox
from tools.command_line import Parser, at_least, one_line

MAX_BODY = 64 * 2**20  # bytes of a request
MAX_FILES = 10_000  # members of an archive
MAX_SIZE = 128 * 2**20  # bytes of its files
MAX_COMMAND = 100_000  # characters
FIELDS = {"docker_image": str, "patch_tar_b64": str, "test_cmd": str, "timeout": (int, float)}


class ExecutorServer(http.server.ThreadingHTTPServer):
    """An executor behind a port of the loopback interface."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, images: Path, backend: sandbox.Backend = "auto", concurrency: int = 4,
                 most_seconds: float = 3600.0, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.images, self.backend, self.most_seconds = images, sandbox.choose(backend), most_seconds
        self.room = threading.BoundedSemaphore(concurrency)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def test(self, request) -> dict:
        """The answer to a request's JSON value. BadInput for what is no such request."""
        if not isinstance(request, dict):
            raise BadInput("expected an object")
        for name, kind in FIELDS.items():
            value = request.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise BadInput(f"field {name}: expected a {'text' if kind is str else 'number'}")
        timeout, command = request["timeout"], request["test_cmd"]
        if not 0 < timeout <= self.most_seconds:
            raise BadInput(f"field timeout: expected more than 0 and at most {self.most_seconds:g} seconds")
        if len(command) > MAX_COMMAND or "\0" in command:
            raise BadInput(f"field test_cmd: expected at most {MAX_COMMAND} characters, and no NUL")
        folder = self.folder(request["docker_image"])
        files = sandbox.read_tree(folder) | unpack(request["patch_tar_b64"])
        done = sandbox.run(["sh", "-c", command], files, backend=self.backend, timeout=float(timeout),
                           cpu=math.ceil(timeout) + 1, memory=4096, processes=256, disk=1024,
                           output=1_000_000)
        return dict(test_output=done.output, exit_code=124 if done.timed_out else done.exit_code,
                    elapsed_seconds=round(done.elapsed, 3), container_id=uuid.uuid4().hex[:12])

    def folder(self, image: str) -> Path:
        """The snapshot of an image, a folder right below --images, whatever the name says."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", image.rpartition("/")[2])
        folder = self.images / name
        if name.strip(".") == "" or len(name) > 200 or folder.is_symlink() or not folder.is_dir():
            raise BadInput(f"field docker_image: no snapshot of {image[:200]!r}")
        return folder

    def handle_error(self, request, client_address):
        """A client that went away is no news."""


def unpack(text: str) -> dict[str, bytes]:
    """The files of an archive in base64. BadInput for one that holds anything but plain files within it."""
    try:
        packed = io.BytesIO(base64.b64decode(text, validate=True))
        archive = tarfile.open(fileobj=packed, mode="r:")
        files, size = {}, 0
        for number, entry in enumerate(archive):
            path = PurePosixPath(entry.name)
            if number >= MAX_FILES:
                raise BadInput(f"field patch_tar_b64: more than {MAX_FILES} files")
            if path.is_absolute() or ".." in path.parts or "\0" in entry.name:
                raise BadInput(f"field patch_tar_b64: {entry.name[:200]!r} leads out of the snapshot")
            if entry.isdir():
                continue
            # A sparse file says how large it is, not what it takes here: no such file is expanded.
            if not entry.isreg() or entry.issparse() or not path.parts:
                raise BadInput(f"field patch_tar_b64: {entry.name[:200]!r} is no plain file")
            size += entry.size
            if size > MAX_SIZE:
                raise BadInput(f"field patch_tar_b64: more than {MAX_SIZE} bytes")
            files[str(path)] = archive.extractfile(entry).read()
        return files
    except BadInput:
        raise
    except (ValueError, tarfile.TarError, OSError, EOFError, OverflowError, RecursionError) as error:
        raise BadInput(f"field patch_tar_b64: expected a tar in base64 ({one_line(error)})") from error


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that a connection may wait for its next bytes

    def do_GET(self):
        found = self.path in ("/health", "/ping")
        self.answer(200 if found else 404, {"status": "ok"} if found else {"error": f"no {self.path[:100]}"})

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,12}", length) or int(length) > MAX_BODY:
            self.close_connection = True
            self.answer(400, {"error": f"Content-Length: expected 0 to {MAX_BODY}"})
            return
        # Taken before the body is read: no more bodies than --concurrency lie in memory.
        if not self.server.room.acquire(blocking=False):
            self.close_connection = True
            self.answer(429, {"error": "too many requests at once"})
            return
        try:
            body = self.rfile.read(int(length))
            if self.path != "/test":
                self.answer(404, {"error": f"no {self.path[:100]}"})
                return
            try:
                answer = 200, self.server.test(json.loads(body))
            except BadInput as error:
                answer = 400, {"error": one_line(error)}
            except (ValueError, RecursionError):
                answer = 400, {"error": "the body is not JSON"}
            except sandbox.SandboxError as error:
                answer = 500, {"error": one_line(error)}
            self.answer(*answer)
        finally:
            self.server.room.release()

    def answer(self, status, reply):
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """No line for each request."""


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Run test commands over snapshots of repositories, on this machine.")
    parser.add_argument("--images", type=Path, required=True, help="folder with a folder for each image")
    parser.add_argument("--port", type=at_least(0, most=65535), default=8002, help="0: a free one (8002)")
    parser.add_argument("--backend", choices=("auto", "bubblewrap", "namespaces"), default="auto",
                        help="what confines the commands (auto)")
    parser.add_argument("--concurrency", type=at_least(1), default=4, help="commands at once (4)")
    parser.add_argument("--max-timeout", type=at_least(1, float), default=3600.0,
                        help="longest time for a command [s] (3600)")
    try:
        args = parser.parse_args(argv)
        if not args.images.is_dir():
            raise BadInput(f"--images {args.images}: expected a folder")
        server = ExecutorServer(args.images, args.backend, args.concurrency, args.max_timeout, args.port)
    except (BadInput, OSError, OverflowError) as error:
        print(json.dumps({"error": one_line(error)}), file=sys.stderr)
        return 1
    print(json.dumps({"url": server.url, "images": str(args.images), "backend": server.backend}), flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
