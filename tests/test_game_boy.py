"""Game Boys: a ROM of our own in PyBoy, against an emulator that the test itself steps."""

import contextlib
import io
import os
import signal
import struct
import subprocess
import sys
import time

import make_rom
import numpy as np
import psutil
import pyboy
import pytest
import torch

from envs import BadInput
from envs.pixels import make_vec
from envs.pixels.game_boy import ACTION_CODEC, Config, goal_meta, record_frames
from envs.pixels.game_boy_worker import Emulator
from envs.pixels.goals import save_goal
from tests.run_folders import until

NAMES = ["NOOP", "A", "B", "START", "UP", "DOWN", "LEFT", "RIGHT"]
TAU = 0.001  # the sprite is 16 of 5,760 cells: 0.0047 in another place, about 0.002 in another shade


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """game.gb; start.state, one step to the right and with DOWN held; goals: two steps to the right."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("game_boy")
    (folder / "game.gb").write_bytes(make_rom.rom())
    boy = boot(folder)
    boy.tick(300, False, False)
    press(boy, "RIGHT")
    boy.button_press("down")
    boy.tick(1, False, False)  # nothing drawn, and a button held: what a state of a user's own may be like
    with open(folder / "start.state", "wb") as file:
        boy.save_state(file)
    for stack_k in (1, 2):
        config = Config(rom=str(folder / "game.gb"), tau=TAU, k_consecutive=2, stack_k=stack_k)
        frames = record_frames(config, ["RIGHT", "RIGHT", "NOOP"])
        save_goal(folder / f"goal{stack_k}", frames, **goal_meta(config))
    return folder


def boot(folder):
    boy = pyboy.PyBoy(io.BytesIO((folder / "game.gb").read_bytes()), window="null", sound_emulated=False)
    boy.set_emulation_speed(0)
    return boy


def begin(boy, folder):
    with open(folder / "start.state", "rb") as file:
        boy.load_state(file)
    boy.button_release("down")
    boy.tick(1, True, False)


def press(boy, name):
    if name != "NOOP":
        boy.button_press(name.lower())
    boy.tick(8, True, False)
    if name != "NOOP":
        boy.button_release(name.lower())
    boy.tick(16, True, False)


def shrink(boy):
    """Shades by hand: PyBoy's greys are 255, 153, 85 and 0."""
    image = np.asarray(boy.screen.image.convert("L")).astype(int)
    shade = np.select([image > 200, image > 120, image > 40], [0, 1, 2], 3)
    mean = shade.reshape(72, 2, 80, 2).sum(axis=(1, 3)) / 4
    return np.floor(mean + 0.5).astype(np.uint8)


def options(folder, stack_k=1, **other):
    return dict(rom=str(folder / "game.gb"), goal_dir=str(folder / f"goal{stack_k}"), tau=TAU,
                k_consecutive=2, stack_k=stack_k) | other


def sprite(frame):
    """(x, y) of the block's corner, in cells."""
    ys, xs = np.where(frame == 3)
    assert len(xs) == 16 and np.ptp(xs) == np.ptp(ys) == 3
    return int(xs.min()), int(ys.min())


def test_the_rom_shows_every_button(folder):
    rom = str(folder / "game.gb")
    x, y = (make_rom.START_X - 8) // 2, (make_rom.START_Y - 16) // 2
    walk = record_frames(Config(rom=rom, stack_k=6), ["NOOP", "RIGHT", "UP", "LEFT", "DOWN"])
    places = [(x, y), (x, y), (x + 8, y), (x + 8, y - 8), (x, y - 8), (x, y)]
    assert [sprite(frame) for frame in walk] == places
    light, dark = record_frames(Config(rom=rom, stack_k=2), ["A", "B"])
    assert (light < 3).all() and (dark == 3).sum() == 16
    short = Config(rom=rom, release_after_frames=3)  # 3 frames of 2 pixels
    assert sprite(record_frames(short, ["RIGHT"])[0]) == (x + 3, y)
    for held, seen in ((8, False), (23, True)):  # released a frame ago, it is seen still
        shades = record_frames(Config(rom=rom, release_after_frames=held), ["START"])
        assert ((shades == 0).mean() < 0.1) == seen


def test_steps_are_those_of_an_emulator_stepped_by_hand(folder):
    rows, stack_k, max_steps = 3, 2, 6
    env = make_vec("pyboy", rows, workers=2, max_steps=max_steps, state=str(folder / "start.state"),
                   **options(folder, stack_k))
    goal = np.load(folder / "goal2" / "goal_template.npy").astype(int)
    # Row 0 comes to the goal, row 1 walks about, row 2 reaches the goal in the very step of its limit.
    script = [["RIGHT", "NOOP", "NOOP", "NOOP"] * 3, list(np.random.default_rng(0).choice(NAMES, 12)),
              ["NOOP", "NOOP", "NOOP", "RIGHT", "NOOP", "NOOP"] * 2]
    boys = [boot(folder) for _ in range(rows)]
    for boy in boys:
        begin(boy, folder)
    first = np.stack([shrink(boys[0])] * stack_k)
    first_dist = np.abs(first - goal).mean() / 3
    stacks, counts, streaks, before = [first] * rows, [0] * rows, [0] * rows, [first_dist] * rows
    obs, seen = env.reset(seed=3), set()
    assert obs.dtype == torch.uint8 and (obs.numpy() == np.stack(stacks)).all()
    for names in zip(*script, strict=True):
        obs, reward, terminated, truncated, info = env.step(torch.tensor(list(map(NAMES.index, names))))
        finals = iter(info["final_obs"])
        for row in range(rows):
            press(boys[row], names[row])
            stacks[row] = np.concatenate([stacks[row][1:], shrink(boys[row])[None]])
            dist = np.abs(stacks[row].astype(int) - goal).mean() / 3
            counts[row] += 1
            streaks[row] = streaks[row] + 1 if dist < TAU else 0
            ended, cut = streaks[row] >= 2, counts[row] >= max_steps
            seen.add((ended, cut))
            assert info["dist"][row].item() == pytest.approx(dist, abs=1e-6)  # before the reset
            assert (terminated[row].item(), truncated[row].item()) == (ended, cut)
            assert info["reset_mask"][row].item() == (ended or cut)
            assert reward[row].item() == pytest.approx(-0.01 + before[row] - dist + 10 * ended, abs=1e-5)
            before[row] = dist
            if ended or cut:
                assert (next(finals).numpy() == stacks[row]).all()
                begin(boys[row], folder)
                stacks[row], counts[row], streaks[row], before[row] = first, 0, 0, first_dist
            assert (obs[row].numpy() == stacks[row]).all()  # after it
            assert (env.frames(row) == 255 - 85 * stacks[row][-1]).all()
        assert next(finals, None) is None
    assert seen == {(True, False), (False, True), (True, True), (False, False)}
    assert (env.goal_picture(0) == 255 - 85 * goal[-1]).all() and env.frames(0).dtype == np.uint8

    meta = env.log_meta
    assert (meta["num_actions"], meta["action_codec_id"], meta["frames_per_step"]) == (8, ACTION_CODEC, 24)
    assert meta["release_after_frames"] == 8 and meta["stack_k"] == 2
    assert {len(meta[key]) for key in ("goal_sha256", "rom_sha256", "state_sha256")} == {64}
    assert meta["rom_path"].endswith("game.gb") and meta["state_path"].endswith("start.state")
    assert env.action_names == NAMES and env.has_goal and env.obs_high == 3

    with pytest.raises(ValueError):
        env.step(torch.tensor([8, 0, 0]))
    state = env.state_dict()
    state["hashes"]["rom"] = "0" * 64
    with pytest.raises(BadInput, match="cartridge or start"):
        env.load_state_dict(state)
    env.close()


def alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_worker_that_dies_is_named_and_nothing_stays_behind(folder):
    env = make_vec("pyboy", 4, workers=2, **options(folder))
    pids = [process.pid for process, *_ in env._workers]
    assert len(pids) == 2 and all(map(alive, pids))
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"worker {pids[1]} \(rows 2 to 3\) died, exit status -9"):
        env.step(torch.zeros(4, dtype=torch.int64))
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # not even as zombies
    with pytest.raises(RuntimeError, match="closed"):
        env.step(torch.zeros(4, dtype=torch.int64))
    env.close()


ORPHAN = """
import os, signal, sys
from envs.pixels import make_vec
env = make_vec("pyboy", 2, workers=2, tau=0.001, k_consecutive=2, rom=sys.argv[1], goal_dir=sys.argv[2])
print(*[process.pid for process, *_ in env._workers], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_leave_with_their_parent(folder):
    out = subprocess.run([sys.executable, "-c", ORPHAN, folder / "game.gb", folder / "goal1"],
                         capture_output=True, text=True, timeout=60)
    pids = list(map(int, out.stdout.split()))
    assert len(pids) == 2 and out.returncode == -signal.SIGKILL
    until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(("change", "message"), [
    (lambda f: {"rom": ""}, "rom: expected"),
    (lambda f: {"rom": f"{f}/none.gb"}, "none.gb: cannot be read"),
    (lambda f: {"rom": f"{f}/start.state"}, "sha256.rom"),
    (lambda f: {"state": f"{f}/cut.state"}, "cut.state: PyBoy cannot load it"),
    (lambda f: {"state": f"{f}/long.state"}, "long.state: PyBoy read"),
    (lambda f: {"goal_dir": ""}, "make_goal.py"),
    (lambda f: {"goal_dir": f"{f}/goal2"}, "stack_k is 2, expected 1"),
    (lambda f: {"frames_per_step": "12"}, "frames_per_step is 24, expected 12"),
    (lambda f: {"tau": "0.01"}, "tau is 0.001, expected 0.01"),
    (lambda f: {"k_consecutive": 3}, "k_consecutive is 2, expected 3"),
    (lambda f: {"goal_dir": "envs/pixels/goals/map1"}, "map1: tau is 0.05, expected 0.001"),
    (lambda f: {"release_after_frames": 24}, "release_after_frames"),
])
def test_bad_input_is_one_line(folder, change, message):
    whole = (folder / "start.state").read_bytes()
    (folder / "cut.state").write_bytes(whole[:5000])
    (folder / "long.state").write_bytes(whole + b"x")
    with pytest.raises(BadInput) as error:
        make_vec("pyboy", 1, **options(folder) | change(folder))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("damage", [lambda rom: b"", lambda rom: rom[:0x134] + b"X" + rom[0x135:]])
def test_a_damaged_cartridge_is_one_line(tmp_path, damage):
    (tmp_path / "bad.gb").write_bytes(damage(make_rom.rom()))
    with pytest.raises(BadInput) as error:
        record_frames(Config(rom=str(tmp_path / "bad.gb")), [])
    assert "bad.gb: PyBoy cannot load it" in str(error.value) and "\n" not in str(error.value)


def test_colours_become_shades_by_luminance():
    class Boy:
        class screen:
            ndarray = np.zeros((144, 160, 4), np.uint8)

    emulator = object.__new__(Emulator)
    emulator.boy, emulator.colour = Boy, 1
    colours = [(255, 255, 255), (0, 255, 0), (255, 0, 0), (0, 0, 255), (0, 0, 0), (255, 255, 0)]
    for index, colour in enumerate(colours):
        Boy.screen.ndarray[:2, 2 * index:2 * index + 2, :3] = colour
    assert emulator.shades()[0, :6].tolist() == [0, 1, 2, 3, 3, 0]


def test_a_cartridges_clock_does_not_know_the_real_time(capfd):
    rom = bytearray(make_rom.rom())
    rom[0x147] = 0x10  # MBC3 with clock, memory and battery
    rom[0x14D] = -sum(value + 1 for value in rom[0x134:0x14D]) & 0xFF
    emulator = Emulator(bytes(rom), False)
    state, now = bytearray(emulator.begin(None, 10)), time.time()
    for place in range(len(state) - 8):  # it holds the time of saving; make that two hours ago
        if abs(struct.unpack_from("d", state, place)[0] - now) < 100:
            struct.pack_into("d", state, place, now - 7200)

    def hours():
        emulator.load(bytes(state))
        memory = emulator.boy.memory
        for address, value in ((0x0000, 0x0A), (0x4000, 0x0A), (0x6000, 0), (0x6000, 1)):  # on, hours, latch
            memory[address] = value
        return memory[0xA000]

    assert hours() == 0
    emulator.boy.rtc_lock_experimental(False)
    assert hours() == 2  # what it would say
    assert capfd.readouterr() == ("", "")  # PyBoy tells of the clock on stdout, where tools print JSON
