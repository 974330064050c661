"""Processes that call functions for envs/openspiel beside the trainer, whose threads cannot.

open_spiel holds Python's lock while it plays. A worker imports neither torch nor the trainer's main module:
it starts in 0.2 s and holds 40 MB. It ends with its parent, however that ends.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import pickle
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

MEMORY = 2 << 30  # of a worker, beside what it starts with [bytes of address space]
LOOK = 5  # so often it looks for its parent, whose connection a forked process may hold as well [s]


class Worker:
    """A process that answers one request at a time, started when it is needed, and anew when it died."""

    process = None

    def ask(self, request: bytes, seconds: float | None):
        """-> (whether the call went well, its result or its exception).

        A process that dies is replaced and asked once more. With a limit in seconds there is no second time.
        RuntimeError: it died, or the limit is over.
        """
        for _ in range(1 if seconds else 2):
            try:
                if self.process is None:
                    self._start()
                self.connection.send_bytes(request)
                if self.connection.poll(seconds):
                    return self.connection.recv()
                reason = f"took over {seconds} s"
            except (EOFError, OSError) as error:
                reason = f"did not start ({error})"
                if self.process is not None:
                    reason = f"died, exit status {self.process.wait()}"
            self.end()
        raise RuntimeError(f"a worker process {reason}{'' if seconds else ', twice'}")

    def end(self):
        if self.process is not None:
            self.connection.close()
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self):
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: modules beside this file are no packages. A session: Ctrl-C does not reach it. No output:
            # open_spiel prints the errors that it raises as well.
            command = [sys.executable, "-P", __file__, str(theirs.fileno()), str(os.getpid())]
            self.connection = Connection(ours.detach())
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                                            start_new_session=True)


class Pool:
    """Up to `count` workers, and a queue before them."""

    def __init__(self, count: int):
        self.count, self.workers, self.unfinished = count, [], 0
        self.queue, self.lock = queue.SimpleQueue(), threading.Lock()
        atexit.register(self._end)

    def submit(self, function, *arguments, seconds: float | None = None) -> Future:
        """Have a worker call a function of a module, see Worker.ask. What waits still may be cancelled."""
        future, request = Future(), pickle.dumps((function, arguments))
        with self.lock:
            self.unfinished += 1
            if len(self.workers) < min(self.unfinished, self.count):
                self.workers.append(Worker())
                threading.Thread(target=self._serve, args=(self.workers[-1],), daemon=True).start()
        self.queue.put((future, request, seconds))
        return future

    def _serve(self, worker):
        while True:
            future, request, seconds = self.queue.get()
            good, result = True, None
            if asked := future.set_running_or_notify_cancel():
                try:
                    good, result = worker.ask(request, seconds)
                except Exception as error:
                    good, result = False, error
            with self.lock:
                self.unfinished -= 1
            if asked:
                (future.set_result if good else future.set_exception)(result)

    def _end(self):
        for worker in self.workers:
            if worker.process is not None:
                worker.process.kill()
                worker.process.wait()


@functools.cache
def shared_pool(count: int) -> Pool:
    """One for all environments of this process."""
    return Pool(count)


def work(connection: Connection, parent: int) -> None:
    """Serve requests until the parent is gone, which a thread notices while another one plays."""
    requests = queue.SimpleQueue()

    def receive():
        try:
            while os.getppid() == parent:
                if connection.poll(LOOK):
                    requests.put(connection.recv_bytes())
        except (EOFError, OSError):
            pass
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        request = requests.get()
        try:
            function, arguments = pickle.loads(request)
            reply = (True, function(*arguments))
        except ValueError as error:  # BadInput among them, whose message is all that a person reads
            reply = (False, error)
        except Exception as error:  # open_spiel's own cannot be sent
            reply = (False, RuntimeError(" ".join(f"{type(error).__name__}: {error}".split())))
        connection.send(reply)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    importlib.import_module("envs.openspiel")  # by name: it imports this file
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    work(Connection(int(sys.argv[1])), int(sys.argv[2]))
