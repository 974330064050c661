"""Processes that call functions beside the trainer, and can be ended where its threads cannot.

open_spiel holds Python's lock while it plays; sympy may not come to an end. A worker imports neither torch
nor the trainer's main module: with open_spiel it starts in 0.2 s and holds 40 MB. It ends with its parent,
however that ends.
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
START = 60  # until it has imported what it needs [s]
STUCK = 60  # after which what uses no processor is given up, where there is a limit [s]
LOOK = 5  # so often it looks for its parent, whose connection a forked process may hold as well [s]


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class WorkerError(OSError):
    """No process could be started, or it came to nothing through no fault of the request."""


class Worker:
    """A process that answers one request at a time, started when it is needed, and anew when it died."""

    process = None

    def __init__(self, modules: tuple[str, ...]):
        self.modules = modules  # that it imports before it answers

    def ask(self, request: bytes, seconds: float | None):
        """-> (whether the call went well, its result or its exception).

        seconds: of processor time, so that a verdict is the same on a busy machine. A process that dies is
        replaced and asked once more. RuntimeError: it died again, or took more time. WorkerError: see there.
        """
        for _ in range(2):
            if self.process is None:
                self._start()
            try:
                self.connection.send_bytes(request)
                if self.connection.poll(seconds and seconds + STUCK):
                    return self.connection.recv()
                status = None
            except (EOFError, OSError):
                status = self.process.wait()
            self.end()
            if status is None:
                raise WorkerError(f"a worker process did not answer in {seconds + STUCK} s")
            if status == -signal.SIGPROF:
                raise RuntimeError(f"a worker process took over {seconds} s")
        raise RuntimeError(f"a worker process died, exit status {status}, twice")

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
            command = [sys.executable, "-P", __file__, str(theirs.fileno()), str(os.getpid()),
                       *self.modules]
            self.connection = Connection(ours.detach())
            try:
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                                stderr=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                                                start_new_session=True)
            except OSError as error:
                self.connection.close()
                raise WorkerError(f"a worker process did not start ({error})") from error
        try:
            ready = self.connection.poll(START) and self.connection.recv()
            reason = f"no answer in {START} s"
        except (EOFError, OSError):
            ready, reason = False, f"exit status {self.process.wait()}"
        if not ready:
            self.end()
            raise WorkerError(f"a worker process did not start ({reason})")


class Pool:
    """Up to `count` workers, and a queue before them."""

    def __init__(self, count: int, modules: tuple[str, ...] = ()):
        self.count, self.modules, self.workers, self.unfinished = count, modules, [], 0
        self.queue, self.lock = queue.SimpleQueue(), threading.Lock()
        atexit.register(self._end)

    def submit(self, function, *arguments, seconds: float | None = None) -> Future:
        """Have a worker call a function of a module, see Worker.ask. What waits still may be cancelled."""
        future, request = Future(), pickle.dumps((function, arguments, seconds))
        with self.lock:
            self.unfinished += 1
            if len(self.workers) < min(self.unfinished, self.count):
                self.workers.append(Worker(self.modules))
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
def shared_pool(count: int, *modules: str) -> Pool:
    """One for all environments of this process that need these modules."""
    return Pool(count, modules)


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
            function, arguments, seconds = pickle.loads(request)
            signal.setitimer(signal.ITIMER_PROF, seconds or 0)  # its signal ends this process
            reply = (True, function(*arguments))
        except ValueError as error:  # BadInput among them, whose message is all that a person reads
            reply = (False, error)
        except Exception as error:  # open_spiel's own cannot be sent
            reply = (False, RuntimeError(" ".join(f"{type(error).__name__}: {error}".split())))
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(reply)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    for module in sys.argv[3:]:
        importlib.import_module(module)
    if sys.platform == "linux":  # macOS keeps to no such limit
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    ours = Connection(int(sys.argv[1]))
    ours.send("ready")
    work(ours, int(sys.argv[2]))
