"""Which tests execute which lines: a plugin of pytest for `tests/mutants.py --matrix` (pip install coverage).

What a shared fixture or a cached function executes is executed by every test that asks for it. Processes that
a test starts are not traced: they count as executing all of the files that their command line names.
"""

import collections
import contextlib
import functools
import multiprocessing.process
import os
import re
import sys
import threading

import pytest


def cpu_seconds():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Tracer:
    def __init__(self, root, files, traced=True):
        """traced: else only the time of each test is measured"""
        self.root, self.files, self.traced = root, files, traced
        self.seconds = {}  # of each test, by its name [CPU s]
        self.failed = set()  # tests
        self.uses = collections.defaultdict(set)  # of a test or something shared: what is shared
        self.whole = collections.defaultdict(set)  # of either: files that a process of its own executes
        self.contexts = [""]  # the innermost one is last; "": imports
        if not traced:
            return
        import coverage  # not in requirements.txt

        paths = [str(root / file) for file in files]
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=paths)
        self.coverage.start()
        functools.cache = self.remembering(functools.cache)
        lru_cache = functools.lru_cache
        functools.lru_cache = lambda maxsize=128, typed=False: (
            self.remembering(lru_cache)(maxsize) if callable(maxsize)
            else self.remembering(lru_cache(maxsize, typed)))
        sys.addaudithook(lambda event, args: event == "subprocess.Popen" and self.starts(args[1]))
        start = multiprocessing.process.BaseProcess.start

        def started(process):
            self.starts(process._args)
            return start(process)

        multiprocessing.process.BaseProcess.start = started

    def starts(self, words):
        text = str(words)
        for file in self.files:
            if re.search(rf"\b{re.escape(file)}|'{re.escape(file.removesuffix('.py'))}'", text):
                self.whole[self.contexts[-1]].add(file)

    @contextlib.contextmanager
    def context(self, name):
        if not self.traced or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.uses[self.contexts[-1]].add(name)
        self.contexts.append(name)
        self.coverage.switch_context(name)
        try:
            yield
        finally:
            self.contexts.pop()
            self.coverage.switch_context(self.contexts[-1])

    def remembering(self, cache):
        """functools.cache or the like, for functions of this repository."""
        def decorate(function):
            module = sys.modules.get(getattr(function, "__module__", None))
            if not str(getattr(module, "__file__", "")).startswith(str(self.root)):
                return cache(function)

            def name_of(args, options):
                return f"cache {function.__qualname__} {hash((args, tuple(options.items())))}"

            @functools.wraps(function, updated=())
            def computed(*args, **options):
                with self.context(name_of(args, options)):
                    return function(*args, **options)

            remembered = cache(computed)

            @functools.wraps(function, updated=())
            def asked(*args, **options):
                self.uses[self.contexts[-1]].add(name_of(args, options))
                return remembered(*args, **options)

            asked.cache_clear, asked.cache_info = remembered.cache_clear, remembered.cache_info
            return asked
        return decorate

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        began = cpu_seconds()
        with self.context(item.nodeid):
            result = yield
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            if definitions[-1].scope != "function":
                self.uses[item.nodeid].add(name_of_fixture(definitions[-1]))
        self.seconds[item.nodeid] = cpu_seconds() - began
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function":
            return (yield)
        with self.context(name_of_fixture(fixturedef)):
            return (yield)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)

    def found(self):
        """-> {file: {line: tests that execute it, and "" where importing it does}}"""
        self.coverage.stop()
        data = self.coverage.get_data()
        users = {}  # of what is shared: the tests
        for test in self.seconds:
            seen, waiting = set(), [test]
            while waiting:
                name = waiting.pop()
                if name not in seen:
                    seen.add(name)
                    users.setdefault(name, set()).add(test)
                    waiting += self.uses[name]
        lines = {}
        for file in self.files:
            of_file = lines[file] = {}
            for line, names in data.contexts_by_lineno(str(self.root / file)).items():
                of_file[line] = set().union({""} & {*names}, *(users.get(name, ()) for name in names))
            for name in [name for name in users if file in self.whole[name]]:
                for line in of_file:
                    of_file[line] |= users[name]
        return lines


def name_of_fixture(fixturedef):
    return f"fixture {fixturedef.baseid} {fixturedef.argname}"
