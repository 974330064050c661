"""Run test commands over snapshots of repositories, for the HTTP executor of envs/code/sandbox.py.

    python tools/executor_server.py --images snapshots --port 8002

    POST /test {"docker_image", "patch_tar_b64", "test_cmd", "timeout"}
        -> {"test_output", "exit_code", "elapsed_seconds", "container_id"}
    GET /health, GET /ping

An image's name stands for a folder of that name under --images (of "registry/name:tag", the part after the
last slash, with _ for what is no letter, digit, dot, dash or underscore). In a sandbox, the archive is
unpacked over it, and `sh -c test_cmd` runs. Exit code 124: out of time. A bad request is answered by 4xx and
one line; 429: more requests than --concurrency, try again. It listens on this machine only, and anyone on it
can use it, but no page in a browser: requests with an Origin, or for another host, are refused. The first
line printed is JSON with the address; --port 0 is a free one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import re
import secrets
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tornado.httpserver
import tornado.netutil
import tornado.web

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput
from envs.code import sandbox, trees
from tools.command_line import Parser, at_least, one_line

MAX_BODY = 64 * 2**20  # bytes of a request
MAX_HEADER = 2**16  # bytes of its header
HEADER_SECONDS, BODY_SECONDS = 20.0, 60.0  # until a header, and then a body, is there as a whole
MAX_COMMAND = 100_000  # characters
FIELDS = {"docker_image": str, "patch_tar_b64": str, "test_cmd": str, "timeout": (int, float)}

# Links and headers of an archive are tar's to read, and what comes of them stays in the sandbox.
UNPACK = 'tar -xf "$1" --no-same-owner 2> /dev/null || { echo "$1"; exit; }; rm "$1"; exec sh -c "$2"'


class ExecutorServer:
    """An executor behind a port of the loopback interface. In a `with` it serves from a thread."""

    def __init__(self, images: Path, concurrency: int = 4, most_seconds: float = 3600.0, port: int = 0):
        sandbox.check()
        self.images, self.most_seconds = images, most_seconds
        self.concurrency, self.running = concurrency, 0
        self.threads = ThreadPoolExecutor(concurrency)
        self.sockets = tornado.netutil.bind_sockets(port, "127.0.0.1")
        self.url = f"http://127.0.0.1:{self.sockets[0].getsockname()[1]}"
        self.loop, self.stopped = asyncio.new_event_loop(), asyncio.Event()

    def serve(self):
        self.loop.run_until_complete(self._serve())

    async def _serve(self):
        pages = [(r"/(health|ping)", Health), (r"/test", Test, dict(executor=self)), (r".*", Page)]
        server = tornado.httpserver.HTTPServer(
            tornado.web.Application(pages, log_function=lambda page: None), max_body_size=MAX_BODY,
            max_buffer_size=MAX_BODY + MAX_HEADER, max_header_size=MAX_HEADER,
            idle_connection_timeout=HEADER_SECONDS, body_timeout=BODY_SECONDS)
        server.add_sockets(self.sockets)
        await self.stopped.wait()
        server.stop()
        await server.close_all_connections()

    def __enter__(self):
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.loop.call_soon_threadsafe(self.stopped.set)
        self.thread.join()
        self.threads.shutdown()
        self.loop.close()

    def test(self, body: bytes) -> dict:
        """The answer to a request. BadInput for what is none."""
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadInput("the body is not JSON") from error
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
        try:
            packed = base64.b64decode(request["patch_tar_b64"], validate=True)
        except ValueError as error:
            raise BadInput("field patch_tar_b64: expected a tar in base64") from error

        archive = f".{secrets.token_hex(16)}"
        files = trees.read(self.folder(request["docker_image"])) | {archive: packed}
        done = sandbox.run(["sh", "-c", UNPACK, "sh", archive, command], files, timeout=float(timeout),
                           cpu=math.ceil(timeout) + 1, memory=4096, processes=256, disk=1024,
                           output=8 * 2**20)
        if done.output == f"{archive}\n":
            raise BadInput("field patch_tar_b64: expected a tar with files within the folder")
        return dict(test_output=done.output, exit_code=124 if done.timed_out else done.exit_code,
                    elapsed_seconds=round(done.elapsed, 3), container_id=uuid.uuid4().hex[:12])

    def folder(self, image: str) -> Path:
        """The snapshot of an image, a folder right below --images, whatever the name says."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", image.rpartition("/")[2])
        folder = self.images / name
        if name.strip(".") == "" or len(name) > 200 or folder.is_symlink() or not folder.is_dir():
            raise BadInput(f"field docker_image: no snapshot of {image[:200]!r}")
        return folder


class Page(tornado.web.RequestHandler):
    """An address where there is nothing."""

    def prepare(self):
        # A page that a browser shows can send requests here, but not without saying where it is from; and
        # where its own name leads here, the host is that name.
        if self.request.host_name not in ("127.0.0.1", "localhost") or "Origin" in self.request.headers:
            self.answer(403, {"error": "requests from elsewhere are refused"})

    def answer(self, status: int, reply: dict):
        self.set_status(status)
        self.finish(reply)

    def write_error(self, status, **details):
        self.answer(status, {"error": self._reason})

    def get(self, *parts):
        self.answer(404, {"error": f"nothing here: {self.request.path[:100]}"})

    post = get


class Health(Page):
    def get(self, name):
        self.answer(200, {"status": "ok"})


class Test(Page):
    def initialize(self, executor: ExecutorServer):
        self.executor = executor

    async def post(self):
        executor, kind = self.executor, self.request.headers.get("Content-Type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            self.answer(415, {"error": f"Content-Type: expected application/json, got {kind[:100]!r}"})
            return
        if executor.running == executor.concurrency:
            self.answer(429, {"error": "too many requests at once"})
            return
        executor.running += 1
        try:
            answer = await executor.loop.run_in_executor(executor.threads, executor.test, self.request.body)
        except BadInput as error:
            self.answer(400, {"error": one_line(error)})
        except sandbox.SandboxError as error:
            self.answer(500, {"error": one_line(error)})
        else:
            self.answer(200, answer)
        finally:
            executor.running -= 1


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Run test commands over snapshots of repositories, on this machine.")
    parser.add_argument("--images", type=Path, required=True, help="folder with a folder for each image")
    parser.add_argument("--port", type=at_least(0, most=65535), default=8002, help="0: a free one (8002)")
    parser.add_argument("--concurrency", type=at_least(1), default=8, help="commands at once (8)")
    parser.add_argument("--max-timeout", type=at_least(1, float), default=3600.0,
                        help="longest time for a command [s] (3600)")
    try:
        args = parser.parse_args(argv)
        if not args.images.is_dir():
            raise BadInput(f"--images {args.images}: expected a folder")
        server = ExecutorServer(args.images, args.concurrency, args.max_timeout, args.port)
    except (BadInput, OSError, OverflowError) as error:
        print(json.dumps({"error": one_line(error)}), file=sys.stderr)
        return 1
    logging.getLogger("tornado").setLevel(logging.ERROR)  # clients that are slow or go away are no news
    print(json.dumps({"url": server.url, "images": str(args.images)}), flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
