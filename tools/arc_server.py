"""Serve our own games (envs/arcagi3/games.py) by the ARC-AGI-3 API, on this machine.

    python tools/arc_server.py --port 8001
    ARC_ROOT_URL=http://127.0.0.1:8001 python tools/run_arc_eval.py --game-id maze-17 --live --scripted

Any game such as maze-17, lights-3 or collect-250 can be played; --seeds says how many of each /api/games
lists. The official client (arc-agi) plays them too, in its modes ONLINE and COMPETITION. To see how a client
copes, it can also misbehave:

    --rate-limit N      429 with Retry-After to what is over N requests a minute
    --fail-every N      each N-th command is answered by 500 and not carried out
    --drop-every N      each N-th command is carried out, and the connection dropped without an answer
    --delay S           each answer is late by S seconds
    --api-key KEY       401 to requests without this X-API-Key
    --require-cookie    400 to commands without the cookie that the first answer has set
    --old-names         fields, states and actions as older servers name them

It listens on this machine only, and no page in a browser can use it: requests with an Origin, or for another
host, are answered by 403. The first line printed is JSON with the address; with --port 0 the port is a free
one. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import http.server
import itertools
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs.arcagi3.games import GAMES, MAX_LEVELS, Arcade
from tools.command_line import at_least

MAX_BODY = 2**20  # bytes of a request
COOKIE = "arc_session=1"
LATEST = 1_000  # requests that are listed
IDLE = 60  # seconds that a connection may wait for its next request


@dataclasses.dataclass
class Faults:
    rate_limit: int = 0  # requests a minute; 0: none of it, here and below
    fail_every: int = 0
    drop_every: int = 0
    delay: float = 0.0  # [s]
    api_key: str = ""
    require_cookie: bool = False


class ArcServer(http.server.ThreadingHTTPServer):
    """An arcade behind a port of the loopback interface. `requests`: the latest (method, path), for tests."""

    daemon_threads = True
    request_queue_size = 128  # many episodes connect at once

    def __init__(self, arcade: Arcade, faults: Faults | None = None, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.arcade, self.faults = arcade, faults or Faults()
        self.requests, self.lock = collections.deque(maxlen=LATEST), threading.Lock()
        self.times = collections.deque(maxlen=max(self.faults.rate_limit, 1))  # of the requests let through
        self.commands = itertools.count(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def over_limit(self) -> float:
        """Seconds until there is room for another request in the last minute's limit; 0: now."""
        with self.lock:
            now, limit = time.monotonic(), self.faults.rate_limit
            if limit and len(self.times) == limit and now - self.times[0] < 60:
                return max(60 - (now - self.times[0]), 0.01)
            self.times.append(now)
            return 0.0

    def handle_error(self, request, client_address):
        """A client that went away is no news."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept
    timeout = IDLE
    disable_nagle_algorithm = True  # head and body are two packets, and the second would wait for an answer

    def do_GET(self):
        self.serve()

    def do_POST(self):
        self.serve()

    def serve(self):
        server, faults = self.server, self.server.faults
        payload, problem = self.payload()
        with server.lock:
            server.requests.append((self.command, self.path))
        time.sleep(faults.delay)
        wait = server.over_limit()
        command = self.path.startswith("/api/cmd/")
        host = self.headers.get("Host", "").partition(":")[0]
        if host not in ("127.0.0.1", "localhost") or "Origin" in self.headers:
            self.close_connection = True
            self.answer(403, {"error": "FORBIDDEN", "message": "requests from elsewhere are refused"})
        elif problem:
            self.close_connection = True
            self.answer(400, {"error": "VALIDATION_ERROR", "message": problem})
        elif wait:
            self.answer(429, {"error": "RATE_LIMIT", "message": "too many requests"}, wait)
        elif faults.api_key and self.headers.get("X-API-Key") != faults.api_key:
            self.answer(401, {"error": "UNAUTHORIZED", "message": "unknown X-API-Key"})
        elif command and faults.require_cookie and COOKIE not in self.headers.get("Cookie", ""):
            self.answer(400, {"error": "SESSION_ERROR", "message": "the session's cookie is missing"})
        else:
            number = next(server.commands) if command else 0
            if number and faults.fail_every and number % faults.fail_every == 0:
                self.answer(500, {"error": "SERVER_ERROR", "message": "a failure, as asked for"})
                return
            status, reply = server.arcade.handle(self.command, self.path, payload)
            if number and faults.drop_every and number % faults.drop_every == 0:
                self.close_connection = True
                return
            self.answer(status, reply)

    def payload(self):
        """-> the JSON value of the body (None without one), what is wrong with it"""
        try:
            length = int(self.headers.get("Content-Length", 0))
            if not 0 <= length <= MAX_BODY:
                return None, "the body is too long"
            body = self.rfile.read(length)
            return (json.loads(body) if body else None), ""
        except (ValueError, RecursionError):
            return None, "the body is not JSON"

    def answer(self, status, reply, retry_after=None):
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if COOKIE not in self.headers.get("Cookie", ""):
            self.send_header("Set-Cookie", f"{COOKIE}; Path=/")
        if retry_after is not None:
            self.send_header("Retry-After", f"{retry_after:.3f}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """No line for each request."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Serve small games by the ARC-AGI-3 API on this machine.")
    count = at_least(0)
    parser.add_argument("--port", type=at_least(0, most=65535), default=8001, help="0: a free one (8001)")
    parser.add_argument("--seeds", type=at_least(1, most=10**6), default=8,
                        help="games of each kind that are listed (8)")
    parser.add_argument("--levels", type=at_least(1, most=MAX_LEVELS), default=MAX_LEVELS,
                        help=f"of each game ({MAX_LEVELS})")
    parser.add_argument("--rate-limit", type=count, default=0, help="requests a minute before 429 (no limit)")
    parser.add_argument("--fail-every", type=count, default=0, metavar="N", help="500 to each N-th command")
    parser.add_argument("--drop-every", type=count, default=0, metavar="N", help="none to each N-th command")
    parser.add_argument("--delay", type=at_least(0, float, 3600), default=0.0,
                        help="seconds that each answer is late (0)")
    parser.add_argument("--api-key", default="", help="401 to requests without it")
    parser.add_argument("--require-cookie", action="store_true", help="400 to commands without the cookie")
    parser.add_argument("--old-names", action="store_true", help="field names of older servers")
    args = parser.parse_args(argv)
    names = {field.name for field in dataclasses.fields(Faults)}
    faults = Faults(**{name: value for name, value in vars(args).items() if name in names})
    ids = [f"{name}-{seed}" for name in GAMES for seed in range(args.seeds)]
    try:
        server = ArcServer(Arcade(ids, args.old_names, args.levels), faults, args.port)
    except OSError as error:
        print(f"--port {args.port}: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"url": server.url}), flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
