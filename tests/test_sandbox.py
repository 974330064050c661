"""Code in the sandbox tries what it must not be able to do; nothing is left of it; the HTTP executor."""

import base64
import concurrent.futures
import contextlib
import errno
import fcntl
import gc
import io
import json
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import tracemalloc
import uuid
from pathlib import Path

import psutil
import pytest
import requests

import envs
from envs.code import executor, sandbox, syscalls, trees
from envs.code.sandbox import Sandbox, SandboxError
from tests import channels, test_repl
from tests.forgeries import PIPES, gone, processes
from tests.run_folders import children_named, in_time
from tools import executor_server

ROOT = Path(__file__).resolve().parent.parent
check = sandbox.check  # which fast tests do without


def run(*argv, **options):
    return sandbox.run(argv, **({"timeout": 20} | options))


def shell(script, **options):
    return run("sh", "-c", script, **options)


def groups_of(pid):
    """The control groups that a process has made for sandboxes."""
    # Not rglob, which fails where a folder vanishes meanwhile.
    return [Path(folder, name) for folder, names, _ in os.walk("/sys/fs/cgroup") for name in names
            if name.startswith(f"sandbox-{pid}-")]


def left_behind():
    """What a sandbox could leave on this machine but for processes."""
    gc.collect()  # files that nobody holds are closed
    texts = [Path(path).read_text() for path in (
        "/proc/self/mountinfo", "/proc/sysvipc/sem", "/proc/sysvipc/shm", "/proc/sysvipc/msg")]
    groups = groups_of(os.getpid())  # others make some, too
    keys = len(Path("/proc/keys").read_text().splitlines())
    # Not every folder there: on a busy machine others make some.
    folders = sorted(path for path in Path(tempfile.gettempdir()).iterdir() if (path / "m.py").exists())
    return texts, groups, keys, folders, len(os.listdir("/proc/self/fd"))


# ---- Attempts


# Each sets `leak` to what it got, or raises OSError. `given` names what there is to get outside.
PRELUDE = '''
import ctypes, glob, json, os, shutil, socket, stat, subprocess, sys
given = json.loads(sys.argv[1])
C = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    """A function of the C library, or the system call with a number on x86-64 and one on arm64."""
    if isinstance(name, int):
        done = C.syscall(args[0] if os.uname().machine == "aarch64" else name, *args[1:])
    else:
        done = getattr(C, name)(*args)
    if done < 0:
        raise OSError(ctypes.get_errno(), str(name))
    return done
def tries(function, values):
    """What the function gives for any of the values."""
    for value in values:
        try:
            if found := function(value):
                return found
        except (OSError, ValueError):  # ValueError: of setrlimit
            pass
def read(path):
    with open(path, "rb") as file:
        return given["secret"].encode() in file.read(100_000)
def write(path):
    with open(path, "a") as file:
        return path
'''
ATTEMPTS = {
    "tcp": 'socket.create_connection(("127.0.0.1", given["tcp"]), 2); leak = "connected"',
    "unix sockets": '''leak = tries(lambda name: not socket.socket(socket.AF_UNIX).connect(name),
                             [given["socket"], "\\0" + given["unix"]])''',
    "udp": 'leak = socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", given["udp"])) and None',
    "environment": 'leak = given["secret"] in str(os.environ)',
    "environment of others": 'leak = tries(read, glob.glob("/proc/[0-9]*/environ"))',
    "secret file": 'leak = read(given["file"])',
    "home": 'leak = [path for path in given["home"] if os.path.exists(path)]',
    "checkout": 'leak = os.listdir(given["checkout"])',
    "roots": 'leak = tries(read, (p + given["file"] for p in glob.glob("/proc/[0-9]*/root")))',
    "open files": 'leak = tries(read, (path for path in glob.glob("/proc/*/fd/*") if os.path.isfile(path)))',
    "open files of its own": '''leak = [
        number for number in map(int, os.listdir("/proc/self/fd"))
        if number > 2 and number not in (reader, writer) and os.path.exists(f"/proc/self/fd/{number}")]''',
    "trainer's processes": 'leak = tries(lambda pid: os.kill(pid, 0) is None and pid, given["pids"])',
    "ptrace": 'leak = tries(lambda pid: call("ptrace", 16, pid, 0, 0) == 0, [1, *given["pids"]])',
    "memory of others": '''leak = tries(lambda path: bool(os.open(path, os.O_RDWR)), (
        path for path in glob.glob("/proc/[0-9]*/mem")
        if int(path.split("/")[2]) not in (os.getpid(), os.getppid())))''',
    "symbolic link": 'os.symlink(given["file"], "soft"); leak = read("soft")',
    "system files": '''leak = tries(write, ["/x", "/usr/x", "/etc/x", "/etc/ld.so.cache", "/dev/x",
        os.path.realpath("/bin/sh"), sys.prefix + "/x", sys.prefix + "/bin/x", os.__file__])''',
    "mounts": '''leak = tries(lambda ask: call(*ask) == 0, [
        ("mount", None, b"/", None, 4096 | 32, None), ("mount", None, b"/usr", None, 4096 | 32, None),
        ("mount", b"x", b"/tmp", b"tmpfs", 0, None), ("umount2", b"/usr", 2), ("umount2", b"/tmp", 2)])''',
    "other roots": '''leak = tries(lambda ask: call(*ask) == 0, [
        ("chroot", b"."), ("chroot", b"/proc/1/root"), (155, 41, b".", b".")])''',
    "new namespaces": 'leak = tries(lambda f: call("unshare", f) == 0, [1 << 17, 1 << 28])',
    "other namespaces": 'leak = tries(lambda f: call("setns", os.open(f, os.O_RDONLY), 0) == 0, '
                        'glob.glob("/proc/1/ns/*"))',
    "setuid programs": '''leak = [command for command in (
        "su -c true", "mount -t tmpfs x /tmp", "umount /tmp", "passwd -d root", "chsh -s /bin/sh")
        if shutil.which(command.split()[0]) and subprocess.run(
            command.split(), stdin=-3, stdout=-3, stderr=-3, timeout=5).returncode == 0]''',
    "capabilities": '''leak = [line for line in open("/proc/self/status") if (
        line.startswith("Cap") and int(line.split()[1], 16) or line == "NoNewPrivs:\\t0\\n")]''',
    "device": 'os.mknod("disk", 0o666 | stat.S_IFBLK, os.makedev(8, 0)); leak = "made"',
    "kernel settings": 'leak = tries(write, ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", '
                       '"/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger", "/proc/sys/fs/file-max"])',
    "sys": 'leak = os.path.exists("/sys/kernel") or os.path.exists("/sys/fs")',
    "priority": 'os.nice(-5); leak = "nicer"',
    "limits": 'import resource as r; leak = tries(lambda n: r.setrlimit(n, (-1, -1)) is None, '
              '[r.RLIMIT_AS, r.RLIMIT_NPROC, r.RLIMIT_CPU, r.RLIMIT_FSIZE])',
    "System V": 'leak = tries(lambda ask: 1 + call(*ask), [("shmget", 0, 4096, 0o1777), '
                '("msgget", 0, 0o1777), ("semget", 0, 32000, 0o600)])',
    "memory of no process": 'call("memfd_create", b"x", 0); leak = "made"',
    "keys": 'leak = tries(lambda ask: call(*ask), [(248, 217, b"user", b"x", b"y", 1, -3), '
            '(250, 219, 0, -3, 0)])',
    "pipes of the parent": '''parent = call(434, 434, os.getppid(), 0)
leak = tries(lambda number: call(438, 438, parent, number, 0), range(9))''',
    "memory of the parent": '''part = (ctypes.c_uint64 * 2)(ctypes.addressof(ctypes.c_uint64()), 8)
leak = call("process_vm_readv", os.getppid(), part, 1, part, 1, 0)''',
    "other kinds of sockets": 'leak = tries(lambda n: socket.socket(n, socket.SOCK_RAW) and n, '
                              '[n for n in range(1, 46) if n not in (1, 2, 10, 16)])',
    "a namespace by clone": 'leak = tries(lambda f: call(56, 220, f | 17, 0, 0, 0, 0) or os._exit(0) or 1, '
                            '[1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30])',
    "a namespace by clone3": 'leak = call(435, 435, (ctypes.c_uint64 * 8)(1 << 28, 0, 0, 0, 17), 64) or 1',
    "what others have read": '''import mmap
file = os.open("/usr/bin/env", os.O_RDONLY)
part = mmap.mmap(file, 4096, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
start = ctypes.addressof(ctypes.c_char.from_buffer(mmap.mmap(-1, 4096)))
leak = tries(lambda ask: 1 + call(*ask), [(27, 232, ctypes.c_void_p(start), 4096, bytes(9))])
assert os.preadv(file, [bytearray(1)], 0) == os.preadv(file, [bytearray(1)], 1) == 1
for flags in (os.RWF_NOWAIT, os.RWF_HIPRI):
    leak = leak or tries(lambda size: os.preadv(file, [bytearray(size)], 0, flags), [1])''',
    "new ways in": '''leak = tries(lambda ask: 1 + call(*ask), [
        (425, 425, 8, (ctypes.c_uint8 * 120)()), (321, 280, 0, (ctypes.c_uint32 * 12)(2, 4, 4, 1), 48),
        (298, 241, (ctypes.c_uint32 * 32)(1, 128), 0, -1, -1, 0), (323, 282, 1)])''',
}
TRIES = PRELUDE + '''
results = {}
for name, code in given["attempts"].items():
    reader, writer = os.pipe()
    if not os.fork():
        try:
            names = dict(globals())
            exec(code, names)
            found = names["leak"]
        except OSError as error:
            found = None
        except BaseException as error:
            found = f"broken: {error!r}"
        os.write(writer, json.dumps(found, default=str)[:1000].encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    results[name] = json.loads(os.read(reader, 1000) or '"it died"')
    os.close(reader)
print(json.dumps(results))
'''


@pytest.fixture
def folder():
    """One that every user can read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.fixture
def outside(monkeypatch, folder):
    """What there is to get on this machine."""
    secret, file, path = uuid.uuid4().hex, folder / "file", str(folder / "socket")
    file.write_text(secret)
    monkeypatch.setenv("SANDBOX_TEST", secret)
    home = [str(path) for path in Path.home().iterdir() if path.is_file()] or [str(file)]
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(subprocess.Popen(["sleep", "1000"], cwd=folder))
        stack.callback(held.kill)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for name in ("\0" + secret, path):
            stack.enter_context(socket.create_server(name, family=socket.AF_UNIX))
        udp = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        # In the sandbox, the first few numbers are its own.
        pids = [pid for pid in (os.getpid(), os.getppid(), held.pid) if pid > 99]
        yield dict(secret=secret, file=str(file), tcp=tcp.getsockname()[1], udp=udp.getsockname()[1],
                   unix=secret, socket=path, home=home, checkout=str(ROOT), pids=pids,
                   attempts=ATTEMPTS), udp
        assert held.poll() is None


@pytest.mark.slow
def test_attempts_to_get_out_fail(outside):
    given, udp = outside
    done = run(sys.executable, "-I", "-S", "-c", TRIES, json.dumps(given), timeout=60)
    leaks = json.loads(done.output.splitlines()[-1])
    assert {name: found for name, found in leaks.items() if found} == {}
    assert leaks.keys() == ATTEMPTS.keys()
    with pytest.raises(BlockingIOError):
        udp.recv(10)


@pytest.mark.slow
def test_the_attempts_succeed_where_nothing_confines_them(outside):
    """So they can tell. Only those that do no harm."""
    given, udp = outside
    harmless = ("tcp", "unix sockets", "udp", "secret file", "home", "checkout",
                "trainer's processes", "symbolic link", "sys", "memory of no process")
    given["attempts"] = {name: ATTEMPTS[name] for name in harmless}
    given["attempts"]["semaphores"] = 'leak = call("semctl", call("semget", 0, 2, 0o600), 0, 0) == 0'
    given["attempts"]["pipes of the parent"] = 'leak = call(438, 438, call(434, 434, os.getppid(), 0), 1, 0)'
    done = subprocess.run([sys.executable, "-I", "-S", "-c", TRIES, json.dumps(given)],
                          stdout=-1, cwd=Path(given["file"]).parent)
    leaks = json.loads(done.stdout.splitlines()[-1])
    assert {name for name, found in leaks.items() if not found} == {"udp"}
    assert not any(str(found).startswith("broken") for found in leaks.values())
    assert udp.recv(10) == b"x"


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "..", ".", "", "a\0b", "\ud800"])
def test_names_that_lead_out_are_refused(path):
    with pytest.raises(envs.BadInput, match="expected a relative path"):
        trees.tar({path: "x"})


# ---- Limits and endings


@pytest.mark.slow
@pytest.mark.parametrize("script", [
    "trap '' TERM INT HUP; while :; do sleep 0.1; done",
    "while :; do echo x; done",  # always something to read
    "exec >&- 2>&-; setsid sleep 1000 & sleep 1000",
])
def test_endless_ones_are_ended(script):
    def check(limit):
        done = shell(script, timeout=limit)
        assert done.timed_out and done.exit_code == 137 and done.elapsed < 20 * limit

    in_time(check)


@pytest.mark.slow
def test_processor_time_is_bounded():
    done = shell("while :; do :; done", cpu=1, timeout=60)
    assert not done.timed_out and done.exit_code in (137, 152)


@pytest.mark.slow
def test_a_fork_bomb_is_stopped():
    code = ("import os, time\nwhile True:\n    try: os.fork()\n"
            "    except OSError as error: print(error, flush=True); time.sleep(0.1)")
    marker, most, calm, said = uuid.uuid4().hex, 0, 0, ""
    for limit in (3.0, 12.0):  # the second where this machine was too busy for the first
        with concurrent.futures.ThreadPoolExecutor() as pool:
            bomb = pool.submit(run, sys.executable, "-I", "-S", "-c", code, marker, timeout=limit,
                               processes=40)
            while not bomb.done():
                most = max(most, len(processes(marker)))
                # Meanwhile, here and in other sandboxes, processes start as ever.
                calm += subprocess.run(["true"]).returncode == 0
        said = bomb.result().output
        if "Resource temporarily unavailable" in said:
            break
    assert "Resource temporarily unavailable" in said
    assert most <= 50 and calm and gone(marker)
    assert shell("echo fine").output == "fine\n"


@pytest.mark.slow
def test_memory_is_bounded():
    code = ("try: bytearray(600 << 20)\nexcept MemoryError: print('refused')\n"
            "bytearray(100 << 20); print('fine')")
    assert run("python3", "-c", code, memory=400).output == "refused\nfine\n"


@pytest.mark.slow
def test_disks_are_bounded():
    script = """for folder in /testbed /tmp /dev/shm; do
        for number in $(seq 20); do head -c 1M /dev/zero > $folder/$number || break; done 2> /dev/null
        echo $folder $(du -s -m -x $folder | cut -f 1)
    done
    rm 1; truncate -s 9M big || echo big"""
    lines = shell(script, disk=8).output.splitlines()
    assert lines[:3] == ["/testbed 8", "/tmp 8", "/dev/shm 8"] and lines[-1] == "big"


@pytest.mark.slow
def test_floods_are_cut_in_the_middle_and_take_no_memory_here(request):
    tracemalloc.start()
    request.addfinalizer(tracemalloc.stop)
    done = shell("echo first; exec yes 0123456789", output=1000)
    peak = tracemalloc.get_traced_memory()[1]
    assert done.exit_code in (137, 141) and not done.timed_out
    assert done.output.startswith("first\n0123456789\n") and done.output.rstrip("0123456789").endswith("\n")
    assert " left out] ..." in done.output and len(done.output) < 1100 and peak < 2**22


@pytest.mark.parametrize("text, limit, expected", [
    ("abcdef", 6, "abcdef"), ("abc", 1, "a\n... [2 left out] ...\n"), ("", 0, ""),
    ("é" * 9, 4, "éé\n... [5 left out] ...\néé"), ("ab" * 500, 4, "ab\n... [996 left out] ...\nab")])
def test_clipping_keeps_head_and_tail(text, limit, expected):
    assert sandbox.clip(text, limit) == expected
    output = sandbox.Output(limit)
    for byte in text.encode():
        output.add(bytes([byte]))
    assert output.text() == expected


@pytest.mark.slow
@pytest.mark.parametrize("script, options, output, code", [
    ('pwd; cat "a/b c.txt" a/ü ./-x; echo > a/new; env | grep -c secret; ls a', dict(
        files={"a/b c.txt": "one", "a/ü": b"two", "-x": "three"}),
     "/testbed\nonetwothree0\nb c.txt\nnew\nü\n", 0),
    (r"printf '\377\000a\303'; echo b >&2; cat name*", dict(files={"name é": b"\xff", "n/m": "\ud800"}),
     "\ufffd\0a\ufffdb\n\ufffd", 0),
    ("wc -c", dict(stdin=bytes(1_000_000)), "1000000\n", 0),  # more than a pipe holds
    ("exec <&-; echo not read; kill -SEGV $$", dict(stdin=bytes(1_000_000)), "not read\n", 139),
    ("exec >&- 2>&-; sleep 2; exit 6", {}, "", 6),  # silent is not over
])
def test_files_input_output_and_exit_codes(monkeypatch, script, options, output, code):
    monkeypatch.setenv("LD_PRELOAD_X", "secret")
    done = shell(script, **options)
    assert (done.output, done.exit_code, done.timed_out) == (output, code, False)


@pytest.mark.slow
def test_what_cannot_be_started_is_an_error_that_says_so():
    before = left_behind()
    for error, says, argv, options in [
            (SandboxError, "9.0 MiB of files, the limit on its disk is 2", ["true"], dict(
                files={"x": bytes(9 << 20)}, disk=2)),
            (SandboxError, "No space left", ["true"], dict(  # as an archive they would fit
                files={f"{number}": bytes(100) for number in range(900)}, disk=2)),
            (envs.BadInput, "cannot be started", ["a\0b"], {}),
            (envs.BadInput, "cannot be started", ["echo", "\ud800"], {})]:
        with pytest.raises(error, match=says):
            run(*argv, **options)
    assert left_behind() == before


@pytest.mark.slow
def test_orphans_are_reaped():
    script = "import os; print(sum(os.system('true &') == 0 for _ in range(600)))"
    done = run("python3", "-c", script, processes=20)
    assert int(done.output.splitlines()[-1]) > 60  # fewer than 600 where orphans wait for a busy machine


# ---- What is left


@pytest.mark.slow
def test_nothing_is_left_of_orphans_and_kills():
    marker, before = uuid.uuid4().hex, left_behind()
    assert shell(f"setsid sh -c 'sleep 1000; : {marker}' & echo done").output == "done\n"
    box = Sandbox(["sh", "-c", f"echo up; sleep 1000; : {marker}"])
    assert box.process.stdout.read(3) == b"up\n" and processes(marker)
    threading.Timer(0.1, box.kill).start()
    assert box.process.stdout.read() == b"" and box.wait(10) == 137
    box.close()
    box.close()
    assert gone(marker) and left_behind() == before


@pytest.mark.slow
def test_a_short_lived_thread_and_high_numbers_of_files():
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(open(os.devnull))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            box = stack.enter_context(pool.submit(Sandbox, ["cat"]).result())
        time.sleep(0.1)
        box.process.stdin.write(b"alive\n")
        assert box.process.stdout.read(6) == b"alive\n"


HOSTILE = [
    "import os, signal; os.kill(-1, signal.SIGKILL)",
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: break",
    "import subprocess; [subprocess.Popen(['setsid', 'sleep', '1000']) for _ in range(9)]",
    "x = [bytearray(10**7) for _ in range(10**4)]",
    "f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(10**7))",
    "while True: print('x' * 10**6)",
    "llm_query_batched(['x'] * 8)",
    "import ctypes\nC = ctypes.CDLL(None)\nfor n in range(1500): C.semget(0, 32000, 0o600)\n"
    "for n in range(99): C.syscall(248, b'user', b'x%d' % n, b'y', 1, -3); C.shmget(0, 2**20, 0o600)",
    "open('m.py', 'a').write('import os; os.system(\\\"setsid sleep 1000 &\\\")'); finish()",
]


@pytest.mark.slow
def test_hundreds_of_episodes_leave_nothing():
    """Sixteen at a time, half of them hostile; some are closed while they run, as by a time limit."""
    env = envs.make("repl", scenarios="tiny", prompt="short", turn_timeout=10.0, memory=256, processes=32)

    def one(number):
        task, fair, cut = env.task("train", number), number % 2, number % 20 == 0
        episode = env.start(task, number)
        closer = threading.Timer(0.3 if cut else 100, episode.close)
        closer.start()
        try:
            step = episode.step(env.solution(task) if fair else HOSTILE[number // 2 % len(HOSTILE)])
            while step.children:
                for _, child in step.children:
                    child.close()
                step = episode.resume([""] * len(step.children))
            step = step if step.terminated or step.truncated else episode.end("length")
            return step.reward == fair
        except SandboxError:
            return cut
        finally:
            closer.cancel()
            closer.join()
            episode.close()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(60)))
        before, memory = left_behind(), psutil.Process().memory_info().rss
        assert all(pool.map(one, range(60, 300)))
        assert left_behind() == before
        # bubblewrap's own processes, of which each has the sandbox's below it
        assert not children_named("bwrap")
        assert psutil.Process().memory_info().rss - memory < 30 * 2**20


TRAINER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from envs.code.sandbox import Sandbox
script = f"echo up; setsid sleep 1000 & sleep 1000; : {sys.argv[3]}"
boxes = [Sandbox(["sh", "-c", script]) for _ in range(int(sys.argv[2]))]
print({box.process.stdout.read(3) for box in boxes}, flush=True)
time.sleep(1000)
"""


def kill_a_trainer(start, number, root=ROOT):
    marker = uuid.uuid4().hex
    trainer = subprocess.Popen([*start, "-c", TRAINER, str(root), str(number), marker],
                               stdout=subprocess.PIPE)
    assert trainer.stdout.readline() == b"{b'up\\n'}\n"
    assert len(processes(marker)) > number
    groups = groups_of(trainer.pid)  # once it is killed, any other trainer may remove them
    trainer.kill()
    trainer.wait()
    assert gone(marker)
    return trainer.pid, groups


@pytest.mark.slow
def test_a_trainer_that_is_killed_leaves_nothing():
    killed, groups = kill_a_trainer([sys.executable], 16)
    assert bool(groups) == bool(controllers())
    check = "from envs.code import sandbox; sandbox.check()"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)
    assert not groups_of(killed)  # control groups go with the next trainer


AS_USER = """
import contextlib, json, sys
sys.path.insert(0, sys.argv[1])
import envs
from envs.code import sandbox
job = json.load(sys.stdin)
done = [vars(sandbox.run(**options)) for options in job["runs"]]
env = envs.make("repl", scenarios="tiny", prompt="short")
task = env.task("train", 0)
with contextlib.closing(env.start(task, 1)) as episode:
    said = episode.step(job["pipes"]).messages[-1]["content"]
    print(json.dumps([*done, said, episode.step(env.solution(task)).reward]))
"""


def ordinary_user(folder):
    """The command of a Python that runs as one, who finds `envs` in the folder."""
    if os.getuid():
        pytest.skip("all of this file runs as an ordinary user already")
    # env: setpriv itself starts its program with some of root's rights left.
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--", "env"]
    new = "import sys; sys.exit(sys.version_info < (3, 11))"
    interpreter = next((path for path in (sys.executable, "/usr/bin/python3")
                        if subprocess.run([*user, path, "-c", new], stderr=-3).returncode == 0), None)
    if interpreter is None:
        pytest.skip("no Python 3.11 that an ordinary user can read")
    shutil.copytree(ROOT / "envs", folder / "envs")
    subprocess.run(["chmod", "-R", "a+rX", folder / "envs"], check=True)
    return [*user, interpreter]


@pytest.mark.slow
def test_as_an_ordinary_user(outside, folder):
    """The same attempts, a fork bomb, the REPL's pipes and a killed trainer, without the rights of root."""
    *user, interpreter = ordinary_user(folder)
    given, _ = outside
    given["attempts"] = {name: code for name, code in ATTEMPTS.items() if name != "checkout"}
    probe = [interpreter, "-I", "-S", "-c"]
    runs = [dict(argv=[*probe, TRIES, json.dumps(given)], timeout=60),
            dict(argv=[*probe, "import os\nwhile True: os.fork()"], timeout=3, processes=40)]
    done = subprocess.run([*user, interpreter, "-c", AS_USER, folder], text=True, capture_output=True,
                          cwd="/", input=json.dumps(dict(runs=runs, pipes=PIPES)))
    assert done.returncode == 0, done.stderr
    attempts, bomb, said, reward = json.loads(done.stdout)
    leaks = json.loads(attempts["output"].splitlines()[-1])
    assert {name: found for name, found in leaks.items() if found} == {}
    assert bomb["elapsed"] < 20 and said == "[]\n[]" and reward == 1
    kill_a_trainer([*user, interpreter], 4, folder)


# ---- What sandboxes that run at once tell each other


# docs/sandbox.md names these.
OPEN = {"futex in a file", "number of those that map a page", "number of a pipe", "number of TCP sockets"}
OPEN_TO_USERS = {"times of a device", "size of a new pipe", "files in flight"}  # all are the same user


def through(where, python=(sys.executable,), folder=ROOT / "tests"):
    """{channel: (bits sent, bits received, errors)}"""
    done = subprocess.run([*python, folder / "channels.py", where], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def heard(found):
    """Channels by which the receiver noticed anything."""
    return {name for name, (_, received, _) in found.items() if len(set(received)) > 1}


@pytest.mark.slow
def test_each_channel_works_where_nothing_confines_it():
    """So it can tell. Not every kernel has all; root has no share to use up, others no file in /usr."""
    found = through("outside")
    works = {name for name, (sent, received, _) in found.items() if sent == received}
    assert len(works) >= 30 and "flock of a file" in works, found.keys() - works


@pytest.mark.slow
def test_sandboxes_tell_each_other_nothing_but_in_the_known_ways():
    """In which bits come through here, too, so the test can hear."""
    found = through("sandboxes")
    assert heard(found) <= (OPEN if os.getuid() == 0 else OPEN | OPEN_TO_USERS)
    assert found["futex in a file"][0] == found["futex in a file"][1]
    assert len({run("cat", "/proc/meminfo", "/proc/stat").output for _ in range(2)}) == 1


@pytest.mark.slow
def test_those_of_an_ordinary_user_neither(folder):
    python = ordinary_user(folder)
    (folder / "tests").mkdir()
    shutil.copy(channels.__file__, folder / "tests")
    assert heard(through("sandboxes", python, folder / "tests")) <= OPEN | OPEN_TO_USERS


GOES_ON = {
    "SQLite in one process": '''
import os, sqlite3, subprocess, sys
one, other = sqlite3.connect("x.db", timeout=0), sqlite3.connect("x.db", timeout=0)
one.execute("create table t(x)")
one.execute("begin immediate")
try:
    other.execute("insert into t values(1)")
except sqlite3.OperationalError:
    one.execute("insert into t values(2)"); one.commit()
subprocess.run([sys.executable, "-c", """
import os, sqlite3
dying = sqlite3.connect("x.db")
dying.execute("pragma cache_size=1")
dying.execute("begin")
dying.executemany("insert into t values(?)", [("a" * 3000,)] * 99)
os.kill(os.getpid(), 9)"""])
assert os.path.exists("x.db-journal") and other.execute("select x from t").fetchall() == [(2,)]
wal = sqlite3.connect("y.db")
assert wal.execute("pragma journal_mode=wal").fetchall() == [("wal",)]
wal.execute("create table t(x)"); wal.commit()''',
    "locks": '''
import fcntl, mailbox, shelve
with open("lock", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
box = mailbox.mbox("box"); box.lock(); box.add("From: a"); box.flush(); box.unlock()
with shelve.open("shelf") as shelf:
    shelf["a"] = 1''',
    "processes": '''
import concurrent.futures, multiprocessing
with multiprocessing.Pool(3) as pool, concurrent.futures.ProcessPoolExecutor(2) as other:
    assert pool.map(abs, range(9)) == list(other.map(abs, range(9)))
queue = multiprocessing.Queue(); queue.put(1); assert queue.get() == 1''',
    "tables of the machine": '''
import os, subprocess
assert os.cpu_count() and len(open("/proc/meminfo").read()) > 500 and "btime" in open("/proc/stat").read()
assert not subprocess.run("ps aux && free && uptime && seq 9 | sort -R", shell=True, stdout=-3).returncode''',
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOES_ON)
def test_what_goes_on_working(name):
    assert run("python3", "main.py", files={"main.py": GOES_ON[name] + "\nprint('fine')"}).output == "fine\n"


# ---- What confines it


def test_without_bubblewrap_nothing_runs_and_the_error_says_what_to_do(tmp_path, monkeypatch):
    for tool in ("setpriv", "prlimit", "tar"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "check", check.__wrapped__)
    with pytest.raises(envs.BadInput) as error:
        envs.make("repl")
    assert str(error.value).startswith("no sandbox for code that a model wrote: bwrap not installed")
    assert "apt-get install bubblewrap" in str(error.value) and "executor_url" in str(error.value)


def verdict(program, machine, number, argument=0, places=range(6)):
    """What the kernel would make of a system call, by its rules of classic BPF: allow, or the error, or 0."""
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    loaded = {0: number, 4: architecture} | {16 + 8 * place: argument for place in places}
    at = 0
    while True:
        kind, if_true, if_false, operand = program[at]
        if kind == 0x06:
            error = operand - 0x50000
            return "allow" if operand == 0x7FFF0000 else errno.errorcode.get(error, error)
        if kind == 0x20:
            value = loaded[operand]
        elif kind == 0x54:
            value &= operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[kind]
            at += if_true if holds else if_false
        at += 1


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_only_listed_system_calls_are_allowed(machine, monkeypatch):
    monkeypatch.setattr(syscalls.platform, "machine", lambda: machine)
    program = list(struct.iter_unpack("=HBBI", syscalls.program.__wrapped__()))
    rows = [line.split() for line in syscalls.TABLE.read_text().splitlines() if line[0] != "#"]
    listed = {int(row[1 if machine == "x86_64" else 2]): row[0] for row in rows
              if row[1 if machine == "x86_64" else 2] != "-"}
    for number in (*range(1000), 2**30 + 1, 2**32 - 1):
        allowed = verdict(program, machine, number) == "allow"
        assert allowed == (number in listed and listed[number] not in (
            "socket", "socketpair", "flock", "fadvise64")), number
    number = {name: number for number, name in listed.items()}
    families = {family for family in range(64)
                if verdict(program, machine, number["socket"], family) == "allow"}
    assert families == {1, 2, 10, 16}  # UNIX, INET, INET6, NETLINK
    assert verdict(program, machine, number["clone"], 0x3D0F00) == "allow"  # a thread's
    assert all(verdict(program, machine, number["clone"], 1 << bit) == "EPERM"
               for bit in (12, 17, 25, 26, 27, 28, 29, 30))  # 12: a file for the process
    assert verdict(program, machine, 435) == "ENOSYS"  # clone3

    def by_argument(name, arguments, place=0):
        return [verdict(program, machine, number[name], argument, [place]) for argument in arguments]

    # Locks and advice on files: done, though nothing is done. Leases, hints and what does not exist yet: no.
    assert {*by_argument("flock", range(16)), *by_argument("fadvise64", range(8))} == {0}
    assert by_argument("fcntl", (fcntl.F_SETLK, fcntl.F_SETLKW, 37, 38), 1) == 4 * [0]
    assert set(by_argument("fcntl", (1024, 1025, 1026, *range(1035, 1050)), 1)) == {"EINVAL"}
    assert set(by_argument("fcntl", (*range(6), 36, fcntl.F_SETPIPE_SZ), 1)) == {"allow"}
    assert by_argument("madvise", (4, 14, 21), 2) == ["allow", "allow", "EINVAL"]
    assert by_argument("mmap", (2, 0x22, 0x40022), 3) == ["allow", "allow", "ENOMEM"]
    assert by_argument("ioctl", (0x5401, 0x541B, 0xC020662A), 1) == ["allow", "allow", "ENOTTY"]
    for name in ("preadv2", "pwritev2"):
        assert {verdict(program, machine, number[name], 1 << bit) for bit in range(32)} == {"EPERM"}
    assert not {row[0] for row in rows} & {  # what nothing above has tried in a sandbox
        "process_vm_writev", "kcmp", "mq_open", "memfd_secret", "open_by_handle_at", "init_module",
        "kexec_load", "mincore", "cachestat", "syslog", "reboot", "clock_settime", "swapon"}


# Seven processes take memory at once, the last of them more than one may have: status 256; of a kill: 9.
CROWD = """
import os, time
for megabytes in [90] * 6 + [200]:
    if not os.fork():
        held = bytearray(megabytes << 20)
        time.sleep(1)
        os._exit(0)
print(sorted(os.wait()[1] for _ in range(7)))
"""
LIMITS = "memory.max", "memory.limit_in_bytes", "pids.max"


def controllers():
    """What control groups that this process can make would limit."""
    found = set()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own = Path("/sys/fs/cgroup", names, path.strip("/"))
        for parent in (own, own.parent) if not names else (own,):
            with contextlib.suppress(OSError):
                (trial := parent / f"test-{uuid.uuid4().hex}").mkdir()
                found |= {name.partition(".")[0] for name in LIMITS if (trial / name).exists()}
                trial.rmdir()
    return found


@pytest.mark.slow
def test_control_groups_bound_what_limits_of_a_process_do_not():
    """And where none can be made, those limits hold."""
    limits, can = dict(memory=120, disk=10, processes=20), controllers()
    statuses = json.loads(run("python3", "-c", CROWD, **limits).output.splitlines()[-1])
    assert statuses.count(256) == 1 and (9 in statuses) == ("memory" in can)
    assert statuses.count(0) == 6 or "memory" in can

    with Sandbox(["cat"], limits=sandbox.Limits(**limits)):
        groups = groups_of(os.getpid())
        assert bool(groups) == bool(can)
        bounds = {file.name.partition(".")[0]: int(file.read_text()) for group in groups for name in LIMITS
                  if (file := group / name).exists()}
        assert bounds == {name: {"memory": 150 << 20, "pids": 28}[name] for name in can}
        assert all((group / "cgroup.procs").read_text() for group in groups)
    assert not groups_of(os.getpid())


def test_trees_are_laid_over_each_other():
    files = {"a": 1, "b/c": 2, "d": 3, "e/f": 4}
    assert trees.laid_over(files, {"a": 5, "b": 6, "d/x": 7}) == {"e/f": 4, "a": 5, "b": 6, "d/x": 7}


SERVER = [sys.executable, str(ROOT / "tools" / "executor_server.py")]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Where snapshots lie: one, and a link to a folder `secret` beside them."""
    images = tmp_path_factory.mktemp("executor") / "images"
    (images / "shop_1").mkdir(parents=True)
    (images / "shop_1" / "a.txt").write_text("old\n")
    (images.parent / "secret").mkdir()
    (images / "link").symlink_to(images.parent / "secret")
    return images


@pytest.fixture(scope="module")
def url(images):
    """A running executor's."""
    argv = [*SERVER, "--images", str(images), "--port", "0", "--concurrency", "2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as server:
        yield json.loads(server.stdout.readline())["url"]
        server.terminate()


@pytest.mark.slow
def test_an_executor_runs_commands_over_a_snapshot(url):
    client = executor.HttpExecutor(url + "/", retries=0)
    client.check()
    done = client.test("registry.example/x/shop:1", {"b/c": b"new\n"}, "cat a.txt b/c; exit 3", 20)
    assert (done.output, done.exit_code, done.timed_out) == ("old\nnew\n", 3, False)

    def check(limit):
        done = client.test("shop_1", {"a.txt": "newer"}, "cat a.txt; echo x > a.txt; sleep 100", limit)
        assert (done.output, done.exit_code, done.timed_out) == ("newer", 124, True)

    in_time(check, (0.5, 2.0, 8.0))
    assert client.test("shop_1", {}, "cat a.txt", 20).output == "old\n"

    with concurrent.futures.ThreadPoolExecutor() as pool:  # no more at once than it was told
        running = [pool.submit(client.test, "shop_1", {}, "sleep 3", 60) for _ in range(3)]
        (refused,) = [future for future in running if future.exception()]
        with pytest.raises(SandboxError, match="answered 429, after 1 tries"):
            refused.result()
        assert [future.result().exit_code for future in running if future is not refused] == [0, 0]

    done = subprocess.run([*SERVER, "--images", "nowhere"], capture_output=True, text=True)
    assert done.returncode == 1 and "--images nowhere" in json.loads(done.stderr)["error"]


def archive(**fields):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        entry = tarfile.TarInfo("x")
        for name, value in fields.items():
            setattr(entry, name, value)
        made.addfile(entry)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.slow
def test_archives_are_unpacked_in_the_sandbox_alone(url, images):
    """Links lead to what the sandbox shows, and headers however long are not this process's to read."""
    def answer(packed, command="ls"):
        return requests.post(f"{url}/test", json=GOOD | dict(
            patch_tar_b64=packed, test_cmd=command, timeout=60))

    secret = images.parent / "secret"
    link = archive(type=tarfile.SYMTYPE, linkname=str(secret))
    assert "a.txt" in answer(link, "echo 1 > x/y || ls").json()["test_output"] and not list(secret.iterdir())

    headers = archive(pax_headers={"comment": "0" * 200_000 + "="}, name="b.txt")

    def quickest(packed):
        seconds = []
        for _ in range(2):
            start = time.monotonic()
            assert answer(packed).json()["test_output"] == "a.txt\nb.txt\n"
            seconds.append(time.monotonic() - start)
        return min(seconds)

    assert quickest(headers) < 50 * quickest(archive(name="b.txt"))


JSON = {"Content-Type": "application/json"}
GOOD = dict(docker_image="shop_1", patch_tar_b64=base64.b64encode(trees.tar({})).decode(), test_cmd="true",
            timeout=5)


@pytest.mark.slow
def test_requests_that_are_refused(url):
    """Each with what is wrong, in one line."""
    def answer(data, headers=JSON, path="/test"):
        found = requests.post(url + path, data=data, headers=headers)
        assert "\n" not in found.json()["error"]
        return found.status_code, found.json()["error"]

    for field, values in dict(
            timeout=[0, True, "5", float("nan")], test_cmd=[None, "a\0"],
            patch_tar_b64=[[], "no base64", "abcd" * 500, archive(name="../x"), archive(size=20_000)],
            docker_image=[1, "other", "..", "", "link", "x/../..", "\0", "a" * 300]).items():
        for value in values:
            status, error = answer(json.dumps(GOOD | {field: value}))
            assert status == 400 and ("no snapshot" in error or field in error), (field, value)
    for body in (b"{", b"[]", b"[" * 9_000, b"\xff"):
        assert answer(body)[0] == 400

    # Pages in a browser, and other servers than this
    for status, headers in [
            (403, {"Origin": "null"}), (403, {"Host": "evil.example"}),
            (403, {"Host": "127.0.0.1.evil.example:8002"}), (415, {"Content-Type": "text/plain"})]:
        assert answer(json.dumps(GOOD), JSON | headers)[0] == status, headers
        health = requests.get(f"{url}/health", headers=headers)
        assert health.status_code == (403 if status == 403 else 200)

    assert answer(b"{}", path="/other")[0] == requests.get(f"{url}/test").status_code == 404
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(b"POST /test HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 400 ")


@pytest.mark.slow
def test_slow_clients_hold_up_nobody_and_have_a_deadline(images, monkeypatch):
    """300 headers and 4 bodies that drip: no thread for them, a request between is answered, and they end."""
    head = b"POST /test HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    def check(limit):
        monkeypatch.setattr(executor_server, "HEADER_SECONDS", limit)
        monkeypatch.setattr(executor_server, "BODY_SECONDS", limit)
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(executor_server.ExecutorServer(images, concurrency=2))
            dripping, threads, begin = [], threading.active_count(), time.monotonic()
            for number in range(304):
                address = "127.0.0.1", int(server.url.rpartition(":")[2])
                dripping.append(stack.enter_context(socket.create_connection(address)))
                dripping[-1].sendall(head + (b"Content-Length: 1000\r\n\r\n{" if number < 4 else b""))
            assert executor.HttpExecutor(server.url).test("shop_1", {}, "echo fine", 20).output == "fine\n"
            assert threading.active_count() <= threads + 2  # those that run commands

            while dripping and time.monotonic() < begin + 7 * limit:
                for connection in select.select(dripping, [], [], 0.05)[0]:
                    dripping.remove(connection)  # it was closed, or answered
                for connection in dripping:
                    with contextlib.suppress(ConnectionError):
                        connection.sendall(b"x")
        assert not dripping and time.monotonic() - begin < 3 * limit

    in_time(check, (3.0, 12.0))


FINE = 200, json.dumps(dict(test_output="ok", exit_code=0, elapsed_seconds=1.5, container_id="c")).encode()
NO_RESULTS = [b"", b"[]", b'{"exit_code": "x"}', b"[" * 100_000,
              b'{"exit_code": Infinity, "test_output": "", "elapsed_seconds": 1}']


@pytest.mark.parametrize("script, asked, says", [
    ([(429, b""), (500, b"x"), requests.ConnectionError(), FINE], 4, None),
    ([(429, b"")], 4, "answered 429, after 4 tries"),
    ([requests.ReadTimeout()], 4, "ReadTimeout, after 4 tries"),
    ([(400, b'{"error": "field timeout: expected a number"}')], 1, "answered 400: .*field timeout: expected"),
    *[([(200, body)], 1, "answered 200: .*expected test_output") for body in NO_RESULTS],
])
def test_when_a_client_tries_again_and_when_it_gives_up(monkeypatch, script, asked, says):
    times = []

    def post(url, json, timeout):
        times.append(timeout)
        found = script[min(len(times), len(script)) - 1]
        if isinstance(found, Exception):
            raise found
        answer = requests.Response()
        answer.status_code, answer._content = found
        return answer

    monkeypatch.setattr(requests, "post", post)
    monkeypatch.setattr(executor.time, "sleep", lambda seconds: None)
    client = executor.HttpExecutor("http://here:1", retries=3)
    if says is None:
        assert client.test("image", {}, "true", timeout=7) == sandbox.Result("ok", 0, 1.5)
    else:
        with pytest.raises(SandboxError, match=f"http://here:1/test {says}"):
            client.test("image", {}, "true", timeout=7)
    assert times == [(10, 7 + executor.PATIENCE)] * asked


@pytest.mark.parametrize("name", ["swe", "repl"])
def test_rewards_of_an_executor_are_said_to_be_forgeable_and_trained_on_only_by_an_option(
        name, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "check", lambda: None)
    monkeypatch.setattr(executor.HttpExecutor, "check", lambda self: None)
    monkeypatch.setattr("envs.code.swe.Swe.guess", lambda *args: 0.0)
    options = {}
    if name == "repl":
        row = test_repl.ROW | dict(docker_image="shop")
        options = dict(cache_dir=test_repl.write_cache(tmp_path, {f"shop-{n}": row for n in range(8)}))
    here = envs.make(name, guessable=True, **options)
    options["executor_url"] = "http://there:1"
    there, trusted = envs.make(name, **options), envs.make(name, **options, trust_executor="true")
    warning = rf"warning: environment {name}: the tests run at executor_url, .* can forge its reward .*"
    assert re.fullmatch(warning, there.about) and trusted.about == there.about and not here.about
    mixed = envs.make(f"{name},countdown", **{f"{name}.{key}": value for key, value in options.items()})
    assert there.about in mixed.about
    for env in (there, mixed):
        assert env.task("test", 0) and env.num_tasks("train")
        expected = f"^environment {name}: option executor_url: .*trust_executor=true"
        with pytest.raises(envs.BadInput, match=expected):
            [env.training_task(cursor, 1) for cursor in range(8)]
        with pytest.raises(envs.BadInput, match="trust_executor=true"):
            [env.task("train", index) for index in range(2)]
    for env, marked in ((here, False), (there, True), (trusted, True)):
        assert not marked or env.task("test", 0).id == here.task("test", 0).id
        assert env is there or env.training_task(3, 1)
        episode = env.start(env.task("test", 0), 1)
        step = episode.step("no diff") if name == "swe" else episode.end("turns")
        assert step.reward == 0 and (step.info.get("unjudged") == 1) is marked
