"""One, two and three processes of torchrun: the same run, whatever happens to them.

Real processes with gloo. a2c_vecenv.py has tests/test_a2c_distributed.py.
"""

import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
import tyro
from filelock import FileLock
from run_folders import ROOT, TINY, log_lines, records
from safetensors.torch import load_file

import grpo_llm
from tools.validate_train_log import validate

# Shares that are uneven: 5 prompts, 13 rows, 7 tasks. Passes of few tokens, so that processes differ in their
# number, and several steps on what was sampled. Little is sampled and learning is slow: where rounding tips a
# token, which becomes likelier with each, two runs part.
FLAGS = {
    "grpo_llm.py": ("--prompts-per-iteration", 5, "--group-size", 6, "--eval-tasks", 7, "--eval-samples", 1,
                    "--epochs", 2, "--minibatches", 2, "--microbatch-tokens", 96, "--kl-coef", 0.05,
                    "--learning-rate", 1e-4),
    "ppo_llm.py": ("--prompts-per-iteration", 13, "--eval-tasks", 7, "--eval-samples", 1, "--epochs", 2,
                   "--minibatches", 2, "--critic-minibatches", 2, "--critic-epochs", 2, "--critic-warmup", 1,
                   "--microbatch-tokens", 96, "--kl-coef", 0.02, "--learning-rate", 1e-4),
    "sft.py": ("--batch-size", 13, "--eval-tasks", 11, "--eval-samples", 2, "--microbatch-tokens", 128,
               "--log-every", 1),
}
LORA = ("--lora-rank", 4, "--learning-rate", 1e-4)


def environment():
    return os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


def command(script, folder, *flags, count=1, torchrun=()):
    """Of `count` processes; without torchrun if it is 1 and nothing is said to torchrun."""
    many = (("-m", "torch.distributed.run", *(torchrun or ("--standalone",)), f"--nproc_per_node={count}")
            if count > 1 or torchrun else ())
    own = ("--output-dir", f"{folder}-model") if script == "sft.py" else ()
    return [sys.executable, *many, str(ROOT / script), "--run-dir", str(folder), *map(str, (*own, *flags))]


def run(script, folder, *flags, check=True, **options):
    done = subprocess.run(command(script, folder, *flags, **options), capture_output=True, text=True,
                          cwd=ROOT, env=environment(), timeout=900)
    if check:
        assert done.returncode == 0, done.stderr[-5000:]
    return folder if check else done


def start(words, **more):
    return subprocess.Popen(words, cwd=ROOT, env=environment() | more, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def steps_of(script, number, every=2):
    name = "--steps" if script == "sft.py" else "--iterations"
    return (name, number, "--eval-every", number, "--checkpoint-every", every, "--keep-checkpoints", 0)


def weights(folder, step):
    (path,) = (folder / "checkpoints" / f"step_{step:06d}").glob("*model.safetensors")
    return load_file(path)


def assert_same_run(one, other, steps, loss=1e-5, weight=1e-4):
    """Losses and gradients of every step to `loss` (relative, where they are over 1), weights to `weight`."""
    same, compared = ("val/", "train/reward", "critic/"), 0
    for mine, yours in zip(records(one), records(other), strict=True):
        assert list(mine) == list(yours) and mine["iteration"] == yours["iteration"]
        for name in mine:
            if "loss" in name or name.endswith("grad_norm") or name.startswith(same):
                if name == "critic/vf_clipfrac":
                    continue  # counts ties, which rounding decides
                tolerance = loss * max(1.0, abs(mine[name]))
                assert mine[name] == pytest.approx(yours[name], abs=tolerance), (name, mine["iteration"])
                compared += 1
            elif name.startswith(("response_length/", "rollout/groups", "rollout/t")) and "thr" not in name:
                assert mine[name] == yours[name], name
    assert compared >= 2 * len(records(one))
    mine, yours = weights(one, steps), weights(other, steps)
    assert set(mine) == set(yours)
    for name in mine:
        assert mine[name].dtype == yours[name].dtype
        torch.testing.assert_close(mine[name], yours[name], rtol=0, atol=weight, msg=name)
    assert validate(other)["ok"]


CASES = {
    "grpo": ("grpo_llm.py", ()), "ppo": ("ppo_llm.py", ()), "sft": ("sft.py", ()),
    "grpo-lora": ("grpo_llm.py", LORA), "ppo-lora": ("ppo_llm.py", (*LORA, "--eval-tasks", 1)),
    "sft-lora": ("sft.py", (*LORA, "--model", TINY, "--dtype", "float32", "--eval-tasks", 1)),
    "few": ("grpo_llm.py", ("--prompts-per-iteration", 2, "--eval-tasks", 1)),  # some processes get none
    "gspo": ("grpo_llm.py", ("--loss", "gspo", "--scale-rewards", "--aggregation", "sequence",
                             "--dynamic-sampling", 2)),
    "turns": ("grpo_llm.py", ("--env", "tests/two_turn.py:TwoTurn", "--max-response-tokens", 24,
                              "--group-size", 5, "--prompts-per-iteration", 3, "--learning-rate", 1e-5,
                              "--kl-coef", 0)),
    "shared-critic": ("ppo_llm.py", ("--critic", "shared", "--target-kl", 0.002)),
    "packing": ("sft.py", ("--packing", "--gradient-checkpointing", "--microbatch-tokens", 256)),
}
LONG = 20  # steps, but of these:
STEPS = dict.fromkeys(("gspo", "turns", "few", "shared-critic", "packing"), 8)
OF_COUNT = {2: tuple(CASES), 3: ("grpo", "sft", "few")}
DRIVER = """
import importlib, json, sys, torch, tyro
import torch.distributed as dist
started = []
for script, words in json.loads(open(sys.argv[1]).read()):
    module = importlib.import_module(script.removesuffix(".py"))
    if dist.is_initialized():
        module.start_processes = lambda args: torch.device("cpu")
    module.end_processes = lambda: None
    module.main(tyro.cli(module.Args, args=words))
dist.destroy_process_group()
"""


def words_of(name, folder, *more):
    script, flags = CASES[name]
    own = ("--output-dir", f"{folder}-model") if script == "sft.py" else ()
    return [script, [str(x) for x in (*FLAGS[script], *flags, "--run-dir", folder, *own,
                                      *steps_of(script, STEPS.get(name, LONG)), *more)]]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """name, make -> the folder that make(folder) has filled, once for all workers of pytest."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def made(name, make):
        folder = base / name
        with FileLock(f"{folder}.lock"):
            if not (folder / "made").exists():
                folder.mkdir()
                make(folder)
                (folder / "made").touch()
        return folder
    return made


@pytest.fixture(scope="session")
def alone(made):
    """Such runs in this one process.  -> folder"""
    def alone(name, seed=1):
        def make(folder):
            script, words = words_of(name, folder / "run", "--seed", seed)
            module = importlib.import_module(script.removesuffix(".py"))
            module.main(tyro.cli(module.Args, args=words))
        return made(f"alone-{name}-{seed}", make) / "run"
    return alone


@pytest.fixture(scope="session")
def several(made):
    """The same runs in several processes, which torchrun starts once for all of them.  -> folder"""
    def several(name, count, seed):
        names = OF_COUNT[count] if seed == 1 else (name,)

        def make(folder):
            (folder / "driver.py").write_text(DRIVER)
            plan = [words_of(name, folder / name, "--seed", seed) for name in names]
            (folder / "plan.json").write_text(json.dumps(plan))
            done = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}",
                 str(folder / "driver.py"), str(folder / "plan.json")], capture_output=True, text=True,
                cwd=ROOT, env=environment() | dict(PYTHONPATH=str(ROOT)), timeout=1500)
            assert done.returncode == 0, done.stderr[-5000:]
        return made(f"several-{count}-{seed}-{name if seed > 1 else 'all'}", make) / name
    return several


@pytest.mark.slow
@pytest.mark.parametrize("count, name", [(count, name) for count in OF_COUNT for name in OF_COUNT[count]])
def test_several_processes_train_as_one_does(name, count, alone, several):
    for seed in (1, 2, 3):
        folder = several(name, count, seed)
        if "lora" in name:
            assert not list(folder.glob("checkpoints/*/model.safetensors"))  # the adapter alone
        try:
            return assert_same_run(alone(name, seed), folder, STEPS.get(name, LONG))
        except AssertionError:  # a tipped token? It would not tip with every seed
            if seed == 3:
                raise


@pytest.mark.slow
def test_the_gradient_of_each_weight_is_that_of_one_process(tmp_path):
    """The update's own, before clipping, of all weights and of an adapter's."""
    one, *more = (gradients(tmp_path, count) for count in (1, 2, 3))
    for kind, name in [(kind, name) for kind, names in one.items() for name in names]:
        gradient = one[kind][name]
        assert gradient.abs().max() > 1e-3 or "lora_A" in name
        for found in more:
            assert set(found[kind]) == set(one[kind])
            torch.testing.assert_close(found[kind][name], gradient, rtol=1e-5, atol=1e-5, msg=name)


GRADIENTS = """
import random, sys, torch, torch.distributed as dist
import grpo_llm as g
found = {}
class Keep(torch.optim.SGD):
    def step(self):
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        for name, p in zip(names, self.param_groups[0]["params"], strict=True):
            found[kind][name] = g.plain(p.grad).clone()
for kind, flags in dict(full={}, lora=dict(lora_rank=3)).items():
    args = g.Args(max_grad_norm=1e9, microbatch_tokens=40, device="cpu", **flags)
    device = device if found else g.start_processes(args)
    torch.manual_seed(3)
    model, rng, groups = g.load_weights(args.model), random.Random(1), []
    model = g.shard(g.add_lora(model, args) if flags else model, device)
    for _ in range(5):
        prompt = [rng.randrange(3, 100) for _ in range(rng.randint(1, 9))]
        groups.append([])
        for _ in range(3):
            segment, count = g.Segment(prompt, advantage=rng.uniform(-1, 1)), rng.randint(1, 12)
            segment.append([rng.randrange(3, 100) for _ in range(count)], 1, [-2.0] * count)
            groups[-1].append(segment)
    keep = Keep([p for p in model.parameters() if p.requires_grad], lr=0.0)
    keep.model, found[kind] = model, {}
    g.update(model, None, keep, groups, args, 0)
if g.rank() == 0:
    torch.save(found, sys.argv[1])
g.end_processes()
"""


def gradients(folder, count):
    script, out = folder / "gradients.py", folder / f"{count}.pt"
    script.write_text(GRADIENTS)
    many = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}") if count > 1 else ()
    subprocess.run([sys.executable, *many, str(script), str(out)], cwd=ROOT, check=True, timeout=600,
                   env=environment() | dict(PYTHONPATH=str(ROOT)))
    return torch.load(out)


# Ends and beginnings


@pytest.mark.slow
@pytest.mark.parametrize("name, before, after", [
    ("grpo", 1, 3), ("ppo-lora", 3, 2), ("sft", 2, 1)])
def test_sigterm_saves_and_ends_with_0_and_any_number_goes_on(name, before, after, alone, tmp_path):
    """Between two checkpoints: what the last iteration did is not lost either."""
    script, folder = CASES[name][0], tmp_path / "run"
    flags = (*FLAGS[script], *CASES[name][1], *steps_of(script, LONG, every=LONG))
    code, said = stopped(script, folder, flags, before, 2)
    assert code == 0, said[-3000:]
    (line,) = re.findall(r"SIGTERM: .*", said)
    last = int(re.search(r"after (?:iteration|step) (\d+), which is saved", line)[1])
    assert f"--run-dir {folder}" in line and 2 <= last < LONG
    assert json.loads((folder / "checkpoints" / "state.json").read_text())["last"] == f"step_{last:06d}"
    run(script, folder, *flags, count=after)
    (mark,) = (line["resume"] for line in log_lines(folder) if "resume" in line)
    assert mark["iteration"] == last
    assert_same_run(alone(name), folder, LONG)
    assert validate(folder)["errors"] == 0


def stopped(script, folder, flags, count, step, sent=signal.SIGTERM, whom=None):
    """A run whose processes get a signal after a step.  -> its exit code, what it said"""
    started = start(command(script, folder, *flags, count=count))
    wait_for(lambda: (folder / "train_log.jsonl").exists() and records(folder)
             and records(folder)[-1]["iteration"] >= step, started)
    trainers = trainers_of(started)
    assert len(trainers) == count
    for trainer in trainers if whom is None else [trainers[whom]]:
        trainer.send_signal(sent)
    said, _ = started.communicate(timeout=300)
    assert not any(trainer.is_running() and trainer.status() != "zombie" for trainer in trainers)
    return started.returncode, said


def trainers_of(started):
    """The processes that train, by rank."""
    found = [p for p in psutil.Process(started.pid).children() if "RANK" in p.environ()]
    return sorted(found, key=lambda p: int(p.environ()["RANK"])) or [psutil.Process(started.pid)]


def wait_for(condition, started):
    while not condition():
        assert started.poll() is None, started.communicate()[0][-5000:]
        time.sleep(0.005)


@pytest.mark.slow
def test_sigterm_of_one_process_or_of_torchrun_ends_all_of_them(alone, tmp_path):
    flags = (*FLAGS["grpo_llm.py"], *steps_of("grpo_llm.py", LONG, every=LONG))
    code, said = stopped("grpo_llm.py", tmp_path / "one", flags, 3, 2, whom=1)
    assert code == 0 and said.count("SIGTERM: stopped after iteration") == 1, said[-3000:]
    whole = tmp_path / "all"
    started = start(command("grpo_llm.py", whole, *flags, count=2))
    wait_for(lambda: (whole / "train_log.jsonl").exists() and len(records(whole)) > 2, started)
    started.terminate()  # torchrun hands it on, and ends with a code of its own
    said, _ = started.communicate(timeout=300)
    assert said.count("SIGTERM: stopped after iteration") == 1, said[-3000:]
    for folder in (tmp_path / "one", whole):
        run("grpo_llm.py", folder, *flags)
        assert_same_run(alone("grpo"), folder, LONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft"])
def test_torchrun_starts_again_after_the_kill_of_a_process(name, alone, tmp_path):
    script = CASES[name][0]
    folder, flags = tmp_path / "run", (*FLAGS[script], *steps_of(script, LONG))
    torchrun = ("--standalone", "--max-restarts=2")
    started = start(command(script, folder, *flags, count=2, torchrun=torchrun))
    wait_for(lambda: any(folder.glob("checkpoints/step_*")), started)
    trainers_of(started)[1].kill()
    said, _ = started.communicate(timeout=600)
    assert started.returncode == 0, said[-5000:]
    assert [line for line in log_lines(folder) if "resume" in line]
    assert_same_run(alone(name), folder, LONG)


FAILING = """
import os
calls = []
def reward(rollout):
    calls.append(1)
    if os.environ.get("RANK") == "1" and len(calls) > 50:
        raise {error}
    return sum(step.reward for step in rollout.steps)
"""


@pytest.mark.slow
def test_a_failing_process_ends_all_with_its_message_and_receipt(tmp_path):
    line = "ValueError: the reward of rank 1 broke"
    (tmp_path / "failing.py").write_text(FAILING.format(error="ValueError('the reward of rank 1 broke')"))
    flags = (*FLAGS["grpo_llm.py"], *steps_of("grpo_llm.py", 400), "--reward-fn",
             f"{tmp_path}/failing.py:reward")
    done = run("grpo_llm.py", tmp_path / "run", *flags, count=3, check=False)
    assert done.returncode != 0 and done.stderr.count(line) == 1, done.stderr[-5000:]
    (receipt,) = (tmp_path / "run").glob("receipts/*/receipt.json")
    receipt = json.loads(receipt.read_text())
    assert line.endswith(f"{receipt['type']}: {receipt['message']}")
    assert any("failing.py" in row for row in receipt["traceback"])
    errors = [row["error"] for row in log_lines(tmp_path / "run") if "error" in row]
    assert [error["message"] for error in errors] == [receipt["message"]]


@pytest.mark.slow
def test_nan_in_one_process_ends_all_with_one_receipt(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING.format(error="StopIteration").replace(
        "raise StopIteration", "return float('nan')"))
    flags = (*FLAGS["grpo_llm.py"], *steps_of("grpo_llm.py", 400), "--reward-fn",
             f"{tmp_path}/failing.py:reward")
    done = run("grpo_llm.py", tmp_path / "run", *flags, count=2, check=False)
    assert done.returncode != 0 and done.stderr.count("FloatingPointError: the reward of task") == 1
    assert len(list((tmp_path / "run").glob("receipts/*"))) == 1


@pytest.mark.slow
def test_bad_input_is_one_line_whatever_the_number_of_processes(tmp_path):
    done = run("grpo_llm.py", tmp_path / "run", "--model", "nowhere/at/all", count=2, check=False)
    assert done.returncode != 0 and done.stderr.count("error: --model nowhere/at/all: expected") == 1
    words = ("--standalone", "--nproc_per_node=2", "--max-restarts=1", str(ROOT / "grpo_llm.py"))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], capture_output=True,
                          text=True, cwd=ROOT, env=environment(), timeout=300)
    assert done.returncode != 0 and "--run-dir: needed with torchrun --max-restarts" in done.stderr


# Two hosts: network namespaces with addresses of their own


@pytest.fixture
def two_hosts():
    """Names of two network namespaces that are joined by a link, and what cuts and mends it."""
    tag = f"{os.getpid() % 10_000}"
    hosts = [f"grpo-{tag}-{side}" for side in "ab"]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for host in hosts:
            ip("netns", "add", host)
        ip("link", "add", f"veth{tag}a", "netns", hosts[0], "type", "veth",
           "peer", "name", f"veth{tag}b", "netns", hosts[1])
        for number, (host, side) in enumerate(zip(hosts, "ab", strict=True), 1):
            ip("-n", host, "addr", "add", f"10.77.{int(tag) % 250}.{number}/24", "dev", f"veth{tag}{side}")
            for device in ("lo", f"veth{tag}{side}"):
                ip("-n", host, "link", "set", device, "up")
        yield hosts, f"10.77.{int(tag) % 250}.1", tag, lambda state: ip(
            "-n", hosts[1], "link", "set", f"veth{tag}b", state)
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True)


def start_on(hosts, address, tag, folder, *flags):
    """torchrun on both hosts, a process on each."""
    started = []
    for number, (host, side) in enumerate(zip(hosts, "ab", strict=True)):
        torchrun = ("--nnodes=2", f"--node_rank={number}", f"--master_addr={address}",
                    "--master_port=29511")
        words = command("grpo_llm.py", folder, *flags, torchrun=torchrun)
        started.append(start(["ip", "netns", "exec", host, *words], GLOO_SOCKET_IFNAME=f"veth{tag}{side}"))
    return started


@pytest.mark.slow
def test_two_hosts_train_and_a_cut_link_is_an_error_after_which_the_run_goes_on(two_hosts, alone, tmp_path):
    hosts, address, tag, link = two_hosts
    folder = tmp_path / "run"
    flags = (*FLAGS["grpo_llm.py"], *steps_of("grpo_llm.py", LONG), "--dist-timeout", 20)
    started = start_on(hosts, address, tag, folder, *flags)
    try:
        wait_for(lambda: any(folder.glob("checkpoints/step_000004")), started[0])
        link("down")
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode != 0 for process in started)
    assert any("another process is gone or does not answer" in text for text in said), said[0][-3000:]
    link("up")
    done = start_on(hosts, address, tag, folder, *flags)
    said = [process.communicate(timeout=600)[0] for process in done]
    assert [process.returncode for process in done] == [0, 0], said[0][-5000:]
    assert_same_run(alone("grpo"), folder, LONG)


# Without processes


def test_random_numbers_are_those_of_splitmix64():
    def reference(seed, count):
        mask, numbers = 2**64 - 1, []
        for _ in range(count):
            seed = (seed + 0x9E3779B97F4A7C15) & mask
            z = ((seed ^ seed >> 30) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
            numbers.append((z ^ z >> 31) >> 11)
        return [number / 2**53 for number in numbers]

    assert int(reference(1234567, 1)[0] * 2**53) == 6457827717110365317 >> 11  # Vigna's test vector
    seeds = [0, 1, 1234567, -1, 2**63 - 1, -2**63, grpo_llm.seed_of("a")]
    state, found = torch.tensor(seeds), []
    for _ in range(20):
        state = state + grpo_llm.GAMMA
        found.append(grpo_llm.uniform(state))
    expected = torch.tensor([reference(seed & 2**64 - 1, 20) for seed in seeds], dtype=torch.float64)
    assert torch.equal(torch.stack(found, 1), expected)


def test_random_numbers_of_replies_are_uniform_and_independent():
    state = torch.tensor([grpo_llm.seed_of(f"1 train {n} 0 0 0") for n in range(4000)])
    columns = []
    for _ in range(16):
        state = state + grpo_llm.GAMMA
        columns.append(grpo_llm.uniform(state))
    numbers = torch.stack(columns, 1)
    assert 0 <= numbers.min() and numbers.max() < 1
    counts = torch.histc(numbers, 50, 0, 1)
    assert float(((counts - 1280) ** 2 / 1280).sum()) < 49 + 5 * math.sqrt(98)
    correlation = torch.corrcoef(numbers.T) - torch.eye(16)
    assert correlation.abs().max() < 5 / math.sqrt(4000)
    assert len(set(grpo_llm.seed_of(f"{n}") for n in range(10_000))) == 10_000


def test_a_reply_does_not_depend_on_what_is_sampled_beside_it(countdown_tiny):
    model, tokenizer = countdown_tiny
    prompts = [tokenizer(f"<bos> {n} 14 8 -> 26 :").input_ids for n in range(1, 13)]
    seeds = [grpo_llm.seed_of(f"{n}") for n in range(12)]
    together = grpo_llm.generate(model, prompts, 16, 1.0, tokenizer, seeds)
    torch.manual_seed(77)
    order = random.Random(1).sample(range(12), 12)
    apart = [grpo_llm.generate(model, [prompts[n]], 16, 1.0, tokenizer, [seeds[n]])[0] for n in order]
    for n, (ids, logprobs) in zip(order, apart, strict=True):
        assert ids == together[n][0] and logprobs == pytest.approx(together[n][1], abs=1e-4)
    others = grpo_llm.generate(model, prompts, 16, 1.0, tokenizer, [seed + 1 for seed in seeds])
    assert [ids for ids, _ in others] != [ids for ids, _ in together]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_items_are_dealt_whole_once_and_evenly(monkeypatch, count):
    monkeypatch.setattr(grpo_llm, "num_ranks", lambda: count)
    rng = np.random.default_rng(1)
    for number in (0, 1, 2, 5, 40):
        sizes = rng.integers(1, 1000, number).tolist()
        hands = grpo_llm.deal(sizes)
        assert sorted(index for hand in hands for index in hand) == list(range(number))
        loads = [sum(sizes[index] for index in hand) for hand in hands]
        # No load is over the mean by more than an item (Graham, SIAM J. Appl. Math. 17, 1969).
        assert max(loads) <= sum(sizes) / count + max([*sizes, 0]) * (1 - 1 / count) + 1e-9
        assert number < 40 or max(loads) < 1.2 * max(sum(sizes) / count, *sizes)
    parts = []
    for rank in range(count):
        monkeypatch.setattr(grpo_llm, "rank", lambda rank=rank: rank)
        parts.append(list(grpo_llm.share(13)))
    assert sum(parts, []) == list(range(13)) and max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ip_is_there():
    """For the two hosts: without it that test could not run in CI."""
    assert shutil.which("ip")
