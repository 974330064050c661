"""What the tests of training runs share: start a script, kill it, read and compare its run folder."""

import ast
import atexit
import contextlib
import copy
import faulthandler
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import multiprocessing.forkserver
import os
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.tensorboard import FileWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "models" / "countdown-tiny")
SMALL = {
    "grpo_llm": dict(iterations=4, prompts_per_iteration=4, group_size=4, eval_tasks=6, eval_samples=2,
                     eval_every=2, checkpoint_every=2, warmup_iterations=2, max_response_tokens=10),
    "ppo_llm": dict(iterations=4, prompts_per_iteration=8, group_size=1, epochs=1, minibatches=2,
                    critic_epochs=2, critic_minibatches=2, critic_warmup=1, warmup_iterations=2,
                    eval_tasks=4, eval_samples=2, eval_every=2, checkpoint_every=2, max_response_tokens=10),
    "sft": dict(steps=4, batch_size=8, eval_tasks=6, eval_samples=2, eval_every=2, checkpoint_every=2,
                log_every=1, warmup_steps=2, max_response_tokens=4),
    "a2c_vecenv": dict(iterations=4, num_envs=6, num_steps=4, hidden_size=16, log_every=1, checkpoint_every=2,
                       eval_every=2, eval_episodes=3, eval_envs=2),
}
LAST = "step_000004"
needs_git = pytest.mark.skipif(not shutil.which("git") and os.environ.get("CI") != "true",
                               reason="git is not installed")


def slow_but(quick, cases):
    """pytest's parameters of all cases, marked as slow but for those in `quick`."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (case not in quick)) for case in cases]


def package(name):
    """-> a module. Where it is not installed the test is skipped, but not in CI, which has it."""
    return importlib.import_module(name) if "CI" in os.environ else pytest.importorskip(name)


@functools.cache
def work():
    """-> CPU seconds of a fixed amount of work on this machine, about a tenth on a quick core."""
    start = time.process_time()
    sorted(range(500_000), key=lambda n: n * 7919 % 1_000_003)
    return time.process_time() - start


@contextlib.contextmanager
def quick(of, most=1):
    """What takes less of this process's CPU time than `most` times that work, however busy the machine is."""
    work()
    gc.disable()  # or rubbish of other tests could be collected just then
    try:
        start = time.process_time()
        yield
        spent = time.process_time() - start
    finally:
        gc.enable()
    assert spent < most * work(), of


def until(condition):
    """Waits. Only what hangs takes the minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_time(check, limits=(0.3, 1.5, 6.0)):
    """The check of a time limit [s] with a longer one where this machine was too busy for the first."""
    *limits, last = limits
    for limit in limits:
        with contextlib.suppress(Exception, pytest.fail.Exception):
            return check(limit)
    return check(last)


def free_port():
    """One below those that a kernel gives to who asks for any, so that nobody gets it before it is used."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def children_named(name):
    """The processes below this one of that name; some may end while they are looked at."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] * (child.name() == name)
    return found


def as_words(flags):
    """Of a command line; a flag of several values has them in a tuple."""
    return [str(word) for flag, value in flags.items()
            for word in (f"--{flag.replace('_', '-')}", *(value if isinstance(value, tuple) else [value]))]


@functools.cache
def variants():
    """What docs/variants.md makes of the scripts with `patch`.  -> {name: path}, beside envs and models"""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    for name in ("envs", "models"):
        Path(folder.name, name).symlink_to(ROOT / name)
    found = {}
    for script, diff, name in re.findall(r"patch (\w+\.py) (\S+\.diff) -o (\w+\.py)",
                                         (ROOT / "docs" / "variants.md").read_text("utf-8")):
        path = Path(folder.name, name)
        subprocess.run(["patch", found.get(script, script), diff, "-o", path], cwd=ROOT, check=True,
                       capture_output=True)
        found[name] = path
    return found


def load_script(path):
    """-> the module that a file is, its main not run"""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.append(str(path.parent))  # for processes that it starts
    spec.loader.exec_module(module)
    return module


@functools.cache
def end_of(module):
    """A script's last block, as code: to import a script anew takes longer than most commands."""
    path = Path(module.__file__)
    *_, block = ast.parse(path.read_text("utf-8")).body
    assert ast.unparse(block.test) == "__name__ == '__main__'"
    return compile(ast.Module(block.body, type_ignores=[]), path, "exec")


def command_line(script, *flags):
    """What a person sees. -> exit code; an exception that is no exit is an error of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, flags)])
        try:
            if "/" in str(script):
                patch.syspath_prepend((ROOT / script).parent)
                runpy.run_path(str(ROOT / script), run_name="__main__")
            elif "RANK" in os.environ:  # which a script reads while it is imported
                runpy.run_module(script.removesuffix(".py"), run_name="__main__", alter_sys=True)
            else:
                module = importlib.import_module(script.removesuffix(".py"))
                with asked_once(module):
                    exec(end_of(module), vars(module))
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
                return 1
            return end.code or 0
    return 0


def told(capsys, main, *words):
    """-> the JSON of the one line that a tool says: a report, or on standard error the error."""
    capsys.readouterr()
    code = main([*map(str, words)])
    said = capsys.readouterr()
    (line,) = (said.err if code else said.out).splitlines()
    report = json.loads(line)
    assert not (said.out if code else said.err) and (code == 1) is ("error" in report)
    return report


def process(script, *flags, torchrun=(), **options):
    """A script in a process of its own, or in those that torchrun starts with these options."""
    environment = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT))
    launcher = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    return subprocess.Popen([sys.executable, *launcher, str(ROOT / script), *map(str, flags)], cwd=ROOT,
                            env=environment | options.pop("env", {}), stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, **options)


def finish(run, fails=False):
    """-> what it said"""
    said, _ = run.communicate(timeout=600)
    assert bool(run.returncode) is fails, said[-5000:]
    return said


IN_TURN = """
import json, multiprocessing, os, signal, sys
from pathlib import Path
from run_folders import spoken
output, folder, environment, lines = json.loads(sys.argv[1])
for number, line in enumerate(lines):
    environment["TORCHELASTIC_RESTART_COUNT"] = str(number)  # each run has keys of its own in the store
    run = multiprocessing.get_context("fork").Process(
        target=spoken, args=(Path(output), folder, environment, *line))
    run.start()
    signal.signal(signal.SIGTERM, lambda *_: run.kill())
    run.join(600)
    run.kill()
    run.join()
    if run.exitcode:
        sys.exit(f"{line}: exit code {run.exitcode}")
"""


def torchrun_in_turn(count, lines, folder, code=0):
    """Command lines, each in processes of its own, forked by those that torchrun starts once for all.

    Those come from the server that torchrun's own comes from (see `fork`): it has no threads. torchrun has,
    and a process that is forked beside threads may crash later, seldom and anywhere.  -> what they said
    """
    path, output = folder / "in_turn.py", folder / "said.txt"
    path.write_text(IN_TURN)
    plan = [str(output), str(ROOT), dict(os.environ), [[str(word) for word in line] for line in lines]]
    run = fork(output, "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", "--run-path",
               "--start-method=forkserver", path, json.dumps(plan), daemon=False)  # it has children
    run.join(900)
    run.kill()
    said = output.read_text()
    crash = said.find("Fatal Python error")  # its frames stand before a long list of modules
    assert run.exitcode == code, said[crash:crash + 6000] if crash >= 0 else said[-5000:]
    return said


def ranks_of(run):
    """The processes that torchrun has started, by rank; without it that of the script."""
    found = [p for p in psutil.Process(run.pid).children() if "RANK" in p.environ()]
    return sorted(found, key=lambda p: int(p.environ()["RANK"])) or [psutil.Process(run.pid)]


def sends_itself(number, folder, condition):
    """-> the environment in which the second process that torchrun starts gets that signal, in its first
    attempt and at an optimiser step, once the condition holds, in words of Python that know `Path`."""
    (folder / "sitecustomize.py").write_text(f"""
import os
if os.environ.get("RANK") == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import torch
    from pathlib import Path
    sent, step = [], torch.optim.AdamW.step

    def sending(*given, **more):
        if not sent and ({condition}):
            sent.append(os.kill(os.getpid(), {int(number)}))
        return step(*given, **more)
    torch.optim.AdamW.step = sending
""")
    return dict(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")


def wait_for(condition, run):
    while not condition():
        assert run.poll() is None, run.communicate()[0][-5000:]
        time.sleep(0.005)


@functools.cache
def forks():
    """What starts processes in which the scripts' libraries are imported already."""
    context = multiprocessing.get_context("forkserver")
    scripts = [path.stem for path in ROOT.glob("*.py")]
    context.set_forkserver_preload([*scripts, __name__, "torch.distributed.run"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
        multiprocessing.forkserver.ensure_running()
    return context


def fork(output, script, *flags, daemon=True, folder=ROOT):
    """A command line in a process that can be killed; what it says goes into a file."""
    output.unlink(missing_ok=True)
    told = output, folder, dict(os.environ), script
    run = forks().Process(target=spoken, args=(*told, *flags), daemon=daemon)
    run.start()
    return run


def spoken(output, folder, environment, script, *flags):
    os.chdir(folder)
    os.environ |= environment
    # What it starts in the same way comes from the server that it came from itself.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None
    with output.open("a", 1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        faulthandler.enable(file)
        sys.exit(command_line(script, *flags))


def slow_clock(patch, step=11.0):
    """Each look at the clock is so many seconds after the one before; the end of a run starts no tool."""
    clock = itertools.count(1000.0, step)
    patch.setattr(time, "perf_counter", lambda: next(clock))
    patch.setattr(os, "system", lambda command: 0)


def write_jsonl(path, rows):
    """One line for each row; bytes are written as they are.  -> the path"""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n"
                              for row in rows))
    return str(path)


@contextlib.contextmanager
def full_disk(size):
    """No file may grow over so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def kill_at(moment, run, folder, rng):
    """SIGKILL while it writes rows or a checkpoint; "log": whenever after one.  -> whether it came to that"""
    def wait_until(condition):
        while not condition() and run.is_alive():
            time.sleep(0.0005)

    def writing():
        return any(folder.glob("data/.*.writing" if moment == "encoding" else "checkpoints/.step_*.writing"))

    log = folder / "train_log.jsonl"
    size = log.stat().st_size if log.exists() else 0
    if moment != "encoding":
        wait_until(lambda: log.exists() and log.stat().st_size != size)
        deadline = time.monotonic() + rng.uniform(0, 1)
        wait_until(lambda: time.monotonic() > deadline)
    if moment == "log":
        wait_until(lambda: any(folder.glob("checkpoints/step_*")))
    while moment != "log" and run.is_alive():
        wait_until(writing)
        time.sleep(rng.uniform(0, 0.3 if moment == "encoding" else 0.01))
        os.kill(run.pid, signal.SIGSTOP)
        while run.is_alive() and psutil.Process(run.pid).status() != psutil.STATUS_STOPPED:
            pass  # a rename is ended first
        if writing():
            break
        os.kill(run.pid, signal.SIGCONT)
    run.kill()
    run.join()
    return run.exitcode == -signal.SIGKILL


def train(script, folder, **flags):
    """A run in this process, from defaults to its end. -> its folder."""
    if not {"env", "env_id", "env_kwargs"} & set(flags):
        few = ("test_tasks=32",)  # which are the first of many more, and sooner found
        flags["env_kwargs"] = {"sft": ("skill=mixed", *few), "a2c_vecenv": ("max_steps=9",)}.get(
            script.__name__, few)
    with asked_once(script):
        script.main(script.Args(**SMALL[script.__name__] | dict(run_dir=str(folder)) | flags))
    return folder


@contextlib.contextmanager
def asked_once(script=None):
    """In a process the shipped model is read once, git is asked once, a template is tried once.

    That is a third of what a short run takes.
    """
    run, check = subprocess.run, getattr(script, "check_template", None)  # a2c_vecenv.py has none

    def ask(command, *given, **options):
        if not str(command).startswith("git describe"):
            return run(command, *given, **options)
        where = options.get("cwd"), os.environ.get("GIT_DIR"), os.environ.get("PATH")
        if where not in GIT_SAYS:
            GIT_SAYS[where] = run(command, *given, **options)
        return GIT_SAYS[where]

    def check_template(tokenizer, name):
        if tokenizer.chat_template not in SOUND:
            check(tokenizer, name)
            SOUND.add(tokenizer.chat_template)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", ask)
        for kind in (AutoModelForCausalLM, AutoTokenizer):
            patch.setattr(kind, "from_pretrained", from_shipped(kind))
        if check:
            patch.setattr(script, "check_template", check_template)
        yield


def from_shipped(kind):
    """Its from_pretrained; of the shipped folder a copy, which takes a tenth of the time."""
    load = kind.from_pretrained

    def from_pretrained(name, **options):
        if Path(name).resolve() != Path(TINY):
            return load(name, **options)
        key = kind, *options.items()
        if key not in SHIPPED:
            SHIPPED[key] = load(TINY, **options)
        return copy.deepcopy(SHIPPED[key])

    return from_pretrained


GIT_SAYS, SOUND, SHIPPED = {}, set(), {}


def signal_once(patch, number, step):
    """This process gets the signal while it logs that step for the first time."""
    add_summary, left = FileWriter.add_summary, [number]

    def signalled(writer, summary, at, *more):
        if at == step and left:
            os.kill(os.getpid(), left.pop())
        add_summary(writer, summary, at, *more)

    patch.setattr(FileWriter, "add_summary", signalled)


def same_end(one, other, step=LAST):
    """Bit for bit: the weights' file, what the trainer keeps beside them, and the log."""
    same_checkpoint(one, other, step)
    for mine, yours in zip(timeless(one), timeless(other), strict=True):
        differ = [name for name in mine.keys() | yours.keys() if mine.get(name) != yours.get(name)]
        assert mine == yours, f"iteration {mine['iteration']} of {other}: other numbers, of {differ}"


def same_checkpoint(one, other, step=LAST):
    """Weights, the state of the optimiser, counters; the critic and its optimiser where there is one."""
    one_end, other_end = one / "checkpoints" / step, other / "checkpoints" / step
    for weights in one_end.glob("*model.safetensors"):
        other = other_end / weights.name
        assert weights.read_bytes() == other.read_bytes(), f"{other} holds other weights than {weights}"
    same_tree(state_of(one_end), state_of(other_end))
    listed = [json.loads((end / "manifest.json").read_text()).keys() for end in (one_end, other_end)]
    assert listed[0] == listed[1]


def state_of(checkpoint):
    """What the trainer keeps in it, the clock aside."""
    state = torch.load(checkpoint / "trainer_state.pt")
    for name in ("elapsed", "log_bytes"):
        state.pop(name, None)
    return state


def weights_of(checkpoint):
    """All that it holds of models: {name: tensor}."""
    files, state = [*checkpoint.glob("*model.safetensors")], state_of(checkpoint)
    return (load_file(files[0]) if files else state["agent"]) | (state.get("critic") or {})


def log_lines(folder):
    return [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]


def receipt_of(folder):
    """The one error of a log.  -> the error, its receipt's meta.json, traceback.txt and folder"""
    (error,) = [line["error"] for line in log_lines(folder) if "error" in line]
    path = folder / error["receipt"]
    meta, frames = json.loads((path / "meta.json").read_text()), (path / "traceback.txt").read_text()
    assert {"versions", "git_sha", "seed", "args", "iteration", "opt_steps"} <= set(meta)
    assert error["type"] in frames
    return error, meta, frames, path


def records(folder):
    return [line for line in log_lines(folder) if "iteration" in line]


def is_time(name):
    return name.startswith(("time/", "system/")) or name in (
        "wall_time_s", "sps", "rollout/throughput", "train/throughput")


def timeless(folder):
    """The records without what depends on the clock and on the run's name."""
    return [{name: value for name, value in record.items() if not is_time(name) and name != "run_id"}
            | {"trace_id": record["trace_id"].split(":")[1]} for record in records(folder)]


def same_tree(one, other, tolerance=0.0, where=""):
    assert type(one) is type(other) or {type(one), type(other)} == {list, tuple}, where
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            same_tree(one[key], other[key], tolerance, f"{where} {key}")
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            same_tree(a, b, tolerance, where)
    else:
        expected = pytest.approx(other, tolerance, tolerance) if isinstance(one, float) else other
        assert one == expected, f"{where}: {one} is not {other}"


def killed_after(whole, target, step):
    """A copy of a run that kept all checkpoints, as a kill leaves it some time after the one of `step`:
    with records that will be made again, an error line of long ago and a line half written."""
    folder, error = shutil.copytree(whole, target), dict(type="OSError", message="", receipt=None)
    for later in (folder / "checkpoints").glob("step_*"):
        if int(later.name[5:]) > step:
            later.rename(later.with_name(f".{later.name}.writing"))  # whole, but for its name
    with (folder / "train_log.jsonl").open("a") as log:
        trace_id = records(folder)[-1]["trace_id"]
        log.write(json.dumps({"trace_id": trace_id, "error": error}) + '\n{"trace_id": "torn')
    return folder


def episodes(folder, name):
    """What a run wrote into episodes/<name>.jsonl.  -> episodes, summary"""
    *found, last = map(json.loads, (folder / "episodes" / f"{name}.jsonl").read_text().splitlines())
    return found, last["summary"]


def full_forward(model, segment, temperature):
    """Log-probabilities and entropies of a segment's response, alone and without a cache, in float64."""
    logits = model(torch.tensor([segment.ids]), use_cache=False).logits[0].double() / temperature
    p = torch.softmax(logits[len(segment.prompt_ids) - 1:-1], -1)
    targets = torch.tensor(segment.response_ids)
    return p[torch.arange(len(targets)), targets].log(), -(p * p.log()).sum(-1)


def gradients(model):
    """All gradients in one vector; they are reset."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return flat


def ranks(count, lines, folder, code=0):
    """Command lines, one after the other, in so many processes that this one forks. They meet as torchrun's
    do, on this machine alone.  -> what each rank has said
    """
    context = multiprocessing.get_context("fork")  # which is quicker than a server of forks
    started, outputs = [], [folder / f"rank_{rank}_of_{count}.txt" for rank in range(count)]
    port = context.SimpleQueue()
    for rank, output in enumerate(outputs):
        environment = dict(
            MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="a test's",
            GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", WORLD_SIZE=str(count), RANK=str(rank),
            LOCAL_RANK=str(rank))
        started.append(context.Process(target=rank_in_turn, args=(output, environment, port, lines),
                                       daemon=True))
        started[-1].start()
    # Only now: it has a thread, which a process must not be forked beside.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in started:
        port.put(str(store.port))
    try:
        for run in started:
            run.join(120)
            assert run.exitcode is not None, f"processes wait for one another: {outputs[0].read_text()}"
            assert run.exitcode == code, "\n".join(output.read_text()[-3000:] for output in outputs)
    finally:
        for run in started:
            run.kill()
    return [output.read_text() for output in outputs]


def rank_in_turn(output, environment, port, lines):
    """What one of the processes does; it ends without Python's end, as the scripts do under torchrun."""
    os.environ |= environment | dict(MASTER_PORT=port.get())
    torch.set_num_threads(1)
    end, code = os._exit, 0
    with output.open("w", 1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        for number, line in enumerate(lines):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # each has keys of its own in the store
            with mock.patch("atexit._run_exitfuncs"), mock.patch("os._exit"):
                code = code or command_line(*line)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    end(code)


def same_numbers(one, other, where):
    """But for times; numbers to 1e-5, tensors to 1e-4."""
    if isinstance(one, dict):
        assert {*one} == {*other}, where
        for name in one:
            if not is_time(str(name)):
                same_numbers(one[name], other[name], f"{where} {name}")
    elif isinstance(one, (list, tuple)):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            same_numbers(left, right, f"{where} {number}")
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=lambda text: f"{where}: {text}")
    else:
        assert one == (pytest.approx(other, rel=1e-5, abs=1e-5) if isinstance(one, float) else other), where
