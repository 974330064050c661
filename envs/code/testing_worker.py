"""Runs inside the sandbox for envs/code/testing.py: tests in a child process, outcomes on standard output.

The parent never runs code of the tree and cannot be read or traced by what does; it alone knows the nonce
that the trainer sent. The child prints to nowhere, and reports each phase of a test once through a pipe that
it got, with a token, before it imported anything of the tree.
"""

import builtins
import json
import os
import select
import signal
import sys
import time
import types

PHASES = ("collect", "setup", "call", "part", "teardown", "told", "end")
MOST_REPORTS = 8 * 2**20  # bytes that the parent reads
MOST_VALUE = 2**16  # characters of a value that is reported


def main():
    down, up = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(down[1])
        os.close(up[0])
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        work(down[0], up[1])
        os._exit(0)
    import ctypes

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/<this>/mem and fd are closed to others
    os.close(down[0])
    os.close(up[1])
    job = json.load(sys.stdin)
    nonce = job.pop("nonce")
    print(nonce, flush=True)  # what follows is the tests' doing; before it, a failure is the sandbox's
    job["token"] = os.urandom(16).hex()
    deadline = time.monotonic() + job["timeout"]
    with os.fdopen(down[1], "w") as pipe:
        json.dump(job, pipe)
    lines = receive(up[0], job["token"], deadline)
    os.kill(child, signal.SIGKILL)
    print(json.dumps([nonce, lines]), flush=True)


def receive(pipe, token, deadline):
    """-> [[test, phase, result], ...] that the child reports until it is done, dies or is out of time"""
    data, end = b"", json.dumps([token, "", "end", ""]).encode()
    while end not in data and len(data) < MOST_REPORTS:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            break
        part = os.read(pipe, 65536)
        if not part:
            break
        data += part
    reports = []
    for line in data.split(b"\n"):
        try:
            given, name, phase, result = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if given == token and isinstance(name, str) and isinstance(result, str) and phase in PHASES:
            reports.append([name, phase, result])
    return reports


def work(down, up):
    with os.fdopen(down) as pipe:
        job = json.load(pipe)
    send = sender(up, job.pop("token"))
    PATIENCE.begin(job["timeout"])
    TELLING.begin(send)
    try:
        run = run_plain if job["plain"] else run_pytest
        run(job, send)
    except BaseException:  # SystemExit and all else that the code may raise
        pass
    send("", "end", "")


def sender(pipe, token, write=os.write, dumps=json.dumps):
    """A function that reports. It holds what it needs, whatever the code under test puts in os and json."""
    def send(name, phase, result):
        data = dumps([token, name, phase, result]).encode() + b"\n"
        while data:
            data = data[write(pipe, data):]
    return send


class TimeUp(BaseException):
    """The test has taken half of the time that was left."""


class Telling:
    """What stands in tests in the place of what they expect: values are reported, and compared elsewhere."""

    def begin(self, send):
        self.send, self.test = send, ""
        builtins.__told__, builtins.__raises__ = self.told, self.raises

    def told(self, number, value, row=None):
        try:
            said = json.dumps(closed(value))
        except (ValueError, TypeError, RecursionError):
            said = '["?"]'
        self.send(self.test, "told", json.dumps([number, row, said if len(said) <= MOST_VALUE else '["?"]']))

    def raises(self, number):
        return Raises(self, number)


class Raises:
    """As pytest.raises and assertRaises, of any exception; which it was is reported."""

    def __init__(self, telling, number):
        self.telling, self.number = telling, number

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is not None and issubclass(kind, TimeUp):
            return False
        names = [one.__name__ for one in kind.__mro__[:50]] if kind else []
        self.value = self.exception = error
        self.type = kind
        self.telling.told(self.number, (names, str(error)[:2000]))
        return True


def closed(value):
    """A value in JSON, of the kinds that can be written down; subclasses as what they are equal to."""
    if "generic" in [kind.__name__ for kind in type(value).__mro__]:  # NumPy's, of one number
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else ["int", hex(value)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).decode("latin-1")]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, dict):
        return ["dict", [[closed(key), closed(value[key])] for key in value]]
    for kind in (list, tuple):
        if isinstance(value, kind):
            return [kind.__name__, [closed(item) for item in value]]
    if isinstance(value, (set, frozenset, type({}.keys()), type({}.items()))):
        return ["set", [closed(item) for item in value]]
    if type(value).__module__ in ("decimal", "_decimal", "_pydecimal"):
        return ["Decimal", str(value)]
    if type(value).__module__ == "fractions":
        return ["Fraction", [value.numerator, value.denominator]]
    if type(value).__module__ == "datetime" and hasattr(value, "isoformat"):
        return [type(value).__name__, value.isoformat()]
    if type(value).__module__ == "datetime" and hasattr(value, "total_seconds"):
        return ["timedelta", [value.days, value.seconds, value.microseconds]]
    return ["?"]


TELLING = Telling()


class Patience:
    """How long a test may take: half of what is left."""

    def begin(self, timeout, now=time.monotonic):
        self.now = now
        self.deadline = now() + timeout

    def left(self):
        return max(0.01, (self.deadline - self.now()) / 2)


PATIENCE = Patience()


def time_up(number, frame):
    raise TimeUp


def run_plain(job, send, setitimer=signal.setitimer, left=PATIENCE.left):
    """The functions test_* of modules, without pytest: no fixtures, no parameters, no classes."""
    wanted = job["names"] and set(job["names"])
    modules = []
    for path, source in job["modules"]:
        name = path[:-3].replace("/", ".")
        module = types.ModuleType(name)
        module.__file__ = os.path.abspath(path)
        modules.append((path, source, module))
    sys.path[:0] = list(dict.fromkeys([os.getcwd(), *(os.path.dirname(m.__file__) for *_, m in modules)]))
    signal.signal(signal.SIGALRM, time_up)
    failures = (BaseException,)
    for path, source, module in modules:
        sys.modules[module.__name__] = module
        try:
            setitimer(signal.ITIMER_REAL, left())
            exec(compile(source, module.__file__, "exec"), module.__dict__)
            setitimer(signal.ITIMER_REAL, 0)
        except failures:
            setitimer(signal.ITIMER_REAL, 0)
            send(path, "collect", "failed")
            continue
        for name, function in list(vars(module).items()):
            full = f"{path}::{name}"
            if not name.startswith("test_") or not isinstance(function, types.FunctionType) or (
                    wanted and full not in wanted):
                continue
            TELLING.test = full
            try:
                setitimer(signal.ITIMER_REAL, left())
                function()
                setitimer(signal.ITIMER_REAL, 0)
                result = "passed"
            except failures:
                setitimer(signal.ITIMER_REAL, 0)
                result = "failed"
            send(full, "call", result)


def run_pytest(job, send):
    import pytest

    plugin = reporter(pytest, job["names"] and set(job["names"]), send)
    # --maxfail=0 takes back an -x of the configuration: the first of the canaries fails. A cache outside the
    # tree: without its plugin, pytest does not know an --ff or --lf of the configuration.
    pytest.main(["-q", "-o", "cache_dir=/tmp/cache", "--maxfail=0", "--continue-on-collection-errors",
                 "--rootdir=.", "--assert=plain", "--tb=no", *(path for path, _ in job["modules"])],
                plugins=[plugin])


def reporter(pytest, wanted, send, setitimer=signal.setitimer, left=PATIENCE.left):
    expected_to_fail = set()

    class Reporter:
        @pytest.hookimpl(tryfirst=True)
        def pytest_load_initial_conftests(self):
            sys.path.insert(0, os.getcwd())  # when pytest and its plugins have been imported

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items):
            items[:] = [item for item in items if not wanted or item.nodeid in wanted]
            # Marked so by the tests: pytest.xfail() called by the code under test counts as a failure.
            expected_to_fail.update(item.nodeid for item in items if item.get_closest_marker("xfail"))

        def pytest_collectreport(self, report):
            if report.failed:
                send(report.nodeid, "collect", "failed")

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_call(self, item):
            signal.signal(signal.SIGALRM, time_up)
            TELLING.test = item.nodeid
            setitimer(signal.ITIMER_REAL, left())
            try:
                return (yield)
            finally:
                setitimer(signal.ITIMER_REAL, 0)

        def pytest_runtest_logreport(self, report):
            name, result = report.nodeid, report.outcome
            if hasattr(report, "context"):  # a subtest's
                if result != "passed":
                    send(name, "part", result)
                return
            if report.when == "call" and result == "skipped" and name in expected_to_fail:
                result = "passed" if hasattr(report, "wasxfail") else result
            send(name, report.when, result)

    return Reporter()


if __name__ == "__main__":
    main()
