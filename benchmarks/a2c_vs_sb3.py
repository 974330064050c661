"""a2c_vecenv.py against stable-baselines3 and a CleanRL-like loop: the same work, in turns, on one thread.

    sh benchmarks/make_sb3_env.sh                        # once: .venv-sb3, where stable-baselines3 lives
    python benchmarks/a2c_vs_sb3.py pixels               # the pixel goal, same network, environment steps/s
    python benchmarks/a2c_vs_sb3.py scale                # ours with 64 to 16,384 environments
    python benchmarks/a2c_vs_sb3.py cartpole             # CartPole-v1 to a greedy return of 500
    python benchmarks/a2c_vs_sb3.py atari                # Pong, same network and preprocessing, steps/s
    python benchmarks/a2c_vs_sb3.py ppo                  # as pixels, of PPO: docs/variants/ppo_vecenv.diff

Each side is a process of its own on the same core: ours runs a2c_vecenv.main itself, stable-baselines3's runs
A2C.learn. They take turns, a block of iterations each, so that a machine that slows down slows all of them;
while one works, the others wait for input. Counted are the process's CPU time and the wall-clock time in
these blocks; imports, set-up, evaluation and checkpoints are not. The log is counted on our side (a record
every 20 iterations); stable-baselines3's is off. Block 0 warms up and is left out of the summary.

`pixels` first prints two checks: that TileWorld below is the world of envs/pixels/pixel_goal.py, and that
from the same weights, on the same rollout (time limits in it), A2C.train of stable-baselines3 computes our
gradient. `ppo` does so with PPO.train and old log-probabilities that are off by some noise, so that the clip
counts.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from sides import REPOSITORY, Worker, check_environment, in_turn, load_ppo

check_environment("gymnasium", "numpy", "torch", "tyro", "pydantic", "PIL")
import gymnasium  # noqa: E402
import numpy as np  # noqa: E402

FIELDS = ("started_at", "mode", "case", "side", "seed", "block", "iterations", "env_steps", "cpu_s", "wall_s",
          "rss_gib", "peak_gib", "greedy")
HIDDEN = dict(small=128, nature=512, patch=128)
SIDES = "sb3,sb3-batched,loop,loop-batched,ours,ours-bfloat16"
CARTPOLE_FLAGS = dict(num_steps=16, learning_rate=3e-3, entropy_coef=0.03, value_coef=0.05,
                      hidden_size=64)  # of a2c_vecenv.py


class Gate:
    """In a worker: hold the training loop until the parent asks for a block, and report what it cost."""

    def __init__(self):
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever the libraries print is not an answer
        self.size = self.left = 0
        self.evaluate = lambda: None

    def iteration(self):
        """Call it before each iteration, and after the last."""
        self.left -= 1
        if self.left > 0:
            return
        if self.size:
            cpu_s, wall_s = time.process_time() - self.cpu, time.perf_counter() - self.wall
            rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self.send(iterations=self.size, cpu_s=cpu_s, wall_s=wall_s, rss_gib=rss / 2**30,
                      peak_gib=peak / 2**30, greedy=self.evaluate())
        else:
            self.send()
        line = sys.stdin.readline().split()
        if not line:
            raise SystemExit(0)
        self.left = self.size = int(line[-1])
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def send(self, **answer):
        print(json.dumps(answer), file=self.answers, flush=True)


# Ours


def script_of(job):
    """a2c_vecenv.py, or in mode `ppo` the variant of it."""
    if job["mode"] == "ppo":
        return load_ppo()
    import a2c_vecenv
    return a2c_vecenv


def work_ours(job, gate):
    """Run the script's main, with a gate before each rollout."""
    script = script_of(job)
    rollout = script.rollout

    def gated(agent, *rest):
        gate.evaluate = lambda: job["env"] == "CartPole-v1" and greedy_return(
            lambda obs: agent(obs)[0].argmax(-1))
        gate.iteration()
        return rollout(agent, *rest)

    script.rollout = gated
    flags = dict(env_id=job["env"], num_envs=job["envs"], num_steps=job["steps"], seed=job["seed"],
                 eval_every=0, eval_episodes=1, eval_envs=1) | job["flags"]
    flags.setdefault("log_every", 20)
    flags["iterations"] = -(-job["iterations"] // flags["log_every"]) * flags["log_every"]
    if job["mode"] == "atari":  # of whole games, so that the evaluation at the end would take long
        flags["iterations"] *= 2
    flags["checkpoint_every"] = flags["iterations"] * 10
    with tempfile.TemporaryDirectory() as folder:
        script.main(script.Args(run_dir=folder, **flags))
    gate.iteration()


# The pixel goal, as others want it


class TileWorld(gymnasium.Env):
    """One world of envs/pixels/pixel_goal.py as a plain Gymnasium environment, in lists and NumPy.

    tables: what `world_tables` returns. All pictures are drawn beforehand, so that a step costs next to
    nothing; a tensor of one row would be slow.
    """

    def __init__(self, tables):
        self.tables, self.config = tables, tables.config
        self.observation_space = gymnasium.spaces.Box(0, 3, tables.pictures.shape[1:], np.uint8)
        self.action_space = gymnasium.spaces.Discrete(8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        starts = self.tables.starts
        menu = self.np_random.random() < self.config.menu_prob
        self.begin(starts[self.np_random.integers(len(starts))] + menu * self.tables.menu)
        return self.tables.pictures[self.code], {}

    def begin(self, code):
        self.code, self.steps, self.streak = code, 0, 0
        self.dist = self.tables.distances[code]

    def step(self, action):
        config, tables = self.config, self.tables
        self.code = tables.next[self.code * 8 + int(action)]
        self.steps += 1
        dist = tables.distances[self.code]
        self.streak = self.streak + 1 if dist < config.tau else 0
        terminated = self.streak >= config.k_consecutive
        reward = config.step_cost + config.alpha * (self.dist - dist) + config.goal_bonus * terminated
        self.dist = dist
        return tables.pictures[self.code], reward, terminated, self.steps >= config.max_steps, {}


def world_tables(env):
    """The tables of a PixelGoal of one map and one goal, with a picture of each of its states."""
    import torch
    states = len(env._distances[0])
    pictures = env._render(torch.arange(states)[:, None], env._new_canvas(states)).numpy()
    return SimpleNamespace(config=env.config, next=env._next.tolist(), pictures=pictures, menu=states // 2,
                           distances=env._distances[0].tolist(), starts=env._start_codes.tolist())


def check_world():
    """Step both implementations with the same actions. Raises AssertionError where they differ."""
    import torch

    from envs.pixels import make_vec
    env = make_vec("pixel-goal", 32)
    worlds = [TileWorld(world_tables(env)) for _ in range(env.num_envs)]
    env.reset(1)
    generator = torch.Generator().manual_seed(1)
    begins = [True] * env.num_envs
    ended = 0
    for _ in range(500):
        for world, code, begin in zip(worlds, env._codes[:, -1].tolist(), begins, strict=True):
            if begin:
                world.begin(code)
        actions = torch.randint(8, (env.num_envs,), generator=generator)
        obs, reward, terminated, truncated, info = env.step(actions)
        theirs = [world.step(action) for world, action in zip(worlds, actions.tolist(), strict=True)]
        begins = info["reset_mask"].tolist()
        shown = obs.clone()
        shown[info["reset_mask"]] = info["final_obs"]
        assert np.array_equal(np.stack([step[0] for step in theirs]), shown.numpy())
        assert np.allclose([step[1] for step in theirs], reward.numpy(), atol=1e-5)
        assert [step[2:4] for step in theirs] == list(zip(terminated.tolist(), truncated.tolist(),
                                                          strict=True))
        ended += sum(begins)
    return f"TileWorld and PixelGoal agree over 500 steps of {env.num_envs} worlds, {ended} episodes"


# stable-baselines3


def sb3_atari(job):
    """The game as stable-baselines3 makes it: single emulators, its own wrappers, the same preprocessing."""
    import ale_py
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack
    gymnasium.register_envs(ale_py)
    emulator = dict(frameskip=1, repeat_action_probability=0.0)  # its wrapper skips
    return VecFrameStack(make_atari_env(job["env"], job["envs"], seed=job["seed"], env_kwargs=emulator), 4)


def sb3_batched(env):
    """A PixelGoal as stable-baselines3's VecEnv: one call for all worlds."""
    import torch
    from stable_baselines3.common.vec_env import VecEnv

    class Batched(VecEnv):
        def reset(self):
            return env.reset(self.first_seed).numpy().copy()

        def step_async(self, actions):
            self.actions = torch.from_numpy(actions)

        def step_wait(self):
            obs, reward, terminated, truncated, info = env.step(self.actions)
            done = info["reset_mask"].numpy()
            infos = [{} for _ in range(env.num_envs)]
            for row, last in zip(done.nonzero()[0], info["final_obs"] if done.any() else (), strict=True):
                infos[row]["terminal_observation"] = last.numpy()
                infos[row]["TimeLimit.truncated"] = bool(truncated[row] & ~terminated[row])
            return obs.numpy().copy(), reward.numpy(), done.copy(), infos

        def seed(self, seed=None):
            self.first_seed = seed or 0

        def close(self):
            env.close()

        def get_attr(self, name, indices=None):
            return [None] * env.num_envs  # render_mode

        def set_attr(self, name, value, indices=None):
            raise NotImplementedError

        def env_method(self, name, *args, indices=None, **kwargs):
            raise NotImplementedError

        def env_is_wrapped(self, wrapper_class, indices=None):
            return [False] * env.num_envs

    space = gymnasium.spaces.Box(0, 3, env.obs_shape, np.uint8)
    batched = Batched(env.num_envs, space, gymnasium.spaces.Discrete(env.num_actions))
    batched.seed(1)
    return batched


def sb3_model(job, worlds, env, args):
    """A2C or PPO of stable-baselines3 with our network, our optimiser and our hyperparameters."""
    import torch
    from stable_baselines3 import A2C, PPO
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    script = script_of(job)

    class Encoder(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, args.hidden_size)
            body = script.Agent(env, args.network, args.hidden_size).body
            self.body = body.to(memory_format=torch.contiguous_format)  # for its initialisation

        def forward(self, obs):
            return self.body(obs / env.obs_high)

    kind, more = A2C, {}
    if job["mode"] == "ppo":
        kind = PPO
        more = dict(n_epochs=args.epochs, clip_range=args.clip,
                    batch_size=args.num_envs * args.num_steps // args.minibatches)
    model = kind(
        "CnnPolicy", worlds, learning_rate=args.learning_rate, n_steps=args.num_steps, gamma=args.gamma,
        gae_lambda=args.gae_lambda, ent_coef=args.entropy_coef, vf_coef=args.value_coef,
        max_grad_norm=args.max_grad_norm, normalize_advantage=args.normalize_advantages, device="cpu",
        seed=job["seed"], policy_kwargs=dict(
            features_extractor_class=Encoder, normalize_images=False, net_arch=[],
            optimizer_class=torch.optim.Adam, optimizer_kwargs=dict(eps=1e-5, fused=True)), **more)
    model.policy.to(memory_format=torch.channels_last)  # as ours
    return model


def script_args(job, **more):
    """The flags that both sides share: the script's defaults, but for what is named here."""
    flags = dict(num_envs=job["envs"], num_steps=job["steps"], seed=job["seed"])
    return script_of(job).Args(**flags | job["flags"] | more)


def work_sb3(job, gate):
    """Run A2C.learn, with a gate before each rollout. CartPole-v1: the settings of its RL Zoo."""
    import torch
    from stable_baselines3 import A2C
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv
    torch.set_num_threads(1)
    if job["env"] == "CartPole-v1":
        model = A2C("MlpPolicy", make_vec_env("CartPole-v1", job["envs"], seed=job["seed"]), ent_coef=0.0,
                    device="cpu", seed=job["seed"])

        def choose(obs):
            return model.policy.get_distribution(obs).distribution.logits.argmax(-1)

        gate.evaluate = lambda: greedy_return(choose)
    else:
        script = script_of(job)
        args = script_args(job, env_id=job["env"])
        atari = job["mode"] == "atari"
        env = script.make_env(args, 1 if atari else job["envs"], torch.device("cpu"))
        worlds = sb3_atari(job) if atari else sb3_batched(env)
        if job["side"] == "sb3" and not atari:
            tables = world_tables(env)
            worlds = DummyVecEnv([lambda: TileWorld(tables)] * job["envs"])
        model = sb3_model(job, worlds, env, args)

    class Gated(BaseCallback):
        def _on_rollout_start(self):
            gate.iteration()

        def _on_step(self):
            return True

    total = job["iterations"] * job["envs"] * job["steps"]
    model.learn(total, callback=Gated(), log_interval=10**9)
    gate.iteration()


def work_check(job, gate):
    """One rollout of ours; its gradient, and that of their `train` on the same rollout and weights."""
    import torch

    script = script_of(job)
    torch.set_num_threads(1)
    text = check_world()
    # A short time limit, so that the rollout has every kind of end in it.
    more = {}
    if job["mode"] == "ppo":
        more = dict(epochs=1, minibatches=1)
    args = script_args(job, max_grad_norm=1e9, **more,
                       env_kwargs=("max_steps=5", "difficulty=4", "k_consecutive=1"))
    env = script.make_env(args, args.num_envs, torch.device("cpu"))
    torch.manual_seed(1)
    agent = script.Agent(env, args.network, args.hidden_size)
    model = sb3_model(job, sb3_batched(env), env, args)
    model._setup_learn(1)
    policy = model.policy
    policy.features_extractor.body.load_state_dict(agent.body.state_dict())
    policy.action_net.load_state_dict(agent.policy.state_dict())
    policy.value_net.load_state_dict(agent.value.state_dict())

    seen, step = [], env.step
    obs = env.reset(1)

    def recorded(actions):
        seen.append((recorded.obs, actions.numpy().copy()))
        result = step(actions)
        recorded.obs = result[0].numpy().copy()
        return result

    recorded.obs, env.step = obs.numpy().copy(), recorded
    obs, batch = script.rollout(agent, env, obs, args)
    values = batch["values"].detach()
    advantages = script.gae(batch["rewards"], values, batch["next_values"], batch["terminated"],
                            batch["reset_mask"], args.gamma, args.gae_lambda)
    returns = advantages + values
    normal = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    old_logprobs = batch["logprobs"].detach()
    if job["mode"] == "ppo":
        old_logprobs = old_logprobs + 0.3 * torch.randn_like(old_logprobs)
        rows = script.ppo_losses(batch["logprobs"] - old_logprobs, batch["values"], values, normal, returns,
                                 args.clip, args.clip_value)
        loss = (rows["policy_loss"] + args.value_coef * rows["value_loss"]).mean()
        loss -= args.entropy_coef * batch["entropies"].mean()
        text += f"\n{rows['clipfrac'].mean():.2f} of the ratios are beyond the clip"
    else:
        loss = script.a2c_loss(batch["logprobs"], batch["entropies"], batch["values"], normal, returns,
                               args.value_coef, args.entropy_coef)[0]
    loss.backward()

    buffer, starts = model.rollout_buffer, np.ones(args.num_envs, bool)
    buffer.reset()
    for t, (shown, actions) in enumerate(seen):
        cut = (batch["truncated"] & ~batch["terminated"])[t]
        rewards = batch["rewards"][t] + args.gamma * batch["next_values"][t] * cut  # as collect_rollouts does
        buffer.add(shown, actions[:, None], rewards.numpy(), starts, values[t], old_logprobs[t])
        starts = batch["reset_mask"][t].numpy()
    with torch.no_grad():
        last = policy.predict_values(obs)
    buffer.compute_returns_and_advantage(last_values=last, dones=starts)
    model.train()
    pairs = [(agent.body, policy.features_extractor.body), (agent.policy, policy.action_net),
             (agent.value, policy.value_net)]
    largest = difference = 0.0
    for mine, other in pairs:
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            largest = max(largest, a.grad.abs().max().item())
            difference = max(difference, (a.grad - b.grad).abs().max().item())
    ends = [int(batch[name].sum()) for name in ("terminated", "truncated")]
    gate.send(text=f"{text}\n{args.network}: the largest gradient is {largest:.3g}, and that of "
                   f"stable-baselines3 differs by at most {difference:.1g} ({args.num_envs * args.num_steps} "
                   f"steps, {ends[0]} terminated, {ends[1]} truncated)", error=difference / largest)


# A loop like CleanRL's


def work_loop(job, gate):
    """A2C as CleanRL would write it: ppo_atari.py with one epoch and one minibatch, and no ratio."""
    import torch
    from torch.distributions import Categorical

    import a2c_vecenv as script
    torch.set_num_threads(1)
    args = script_args(job)
    envs = batched = script.make_env(args, args.num_envs, torch.device("cpu"))
    if job["side"] == "loop":
        tables = world_tables(batched)
        envs = gymnasium.vector.SyncVectorEnv(
            [lambda: TileWorld(tables)] * args.num_envs,
            autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
    agent = script.Agent(batched, args.network, args.hidden_size)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    size = (args.num_steps, args.num_envs)
    obs = torch.zeros(*size, *batched.obs_shape)
    actions, logprobs, rewards, dones, values = (torch.zeros(size) for _ in range(5))
    next_obs = envs.reset(seed=1)
    next_obs = torch.Tensor(next_obs[0]) if job["side"] == "loop" else next_obs.float()
    next_done = torch.zeros(args.num_envs)
    for _ in range(job["iterations"]):
        gate.iteration()
        for step in range(args.num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                logits, value = agent(next_obs)
                distribution = Categorical(logits=logits)
                action = distribution.sample()
                logprobs[step] = distribution.log_prob(action)
            values[step], actions[step] = value, action
            if job["side"] == "loop":
                next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
                rewards[step] = torch.tensor(reward)
                next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(terminated | truncated)
            else:
                next_obs, rewards[step], terminated, truncated, _ = envs.step(action)
                next_obs, next_done = next_obs.float(), (terminated | truncated).float()
        with torch.no_grad():
            next_value, trace, advantages = agent(next_obs)[1], 0, torch.zeros_like(rewards)
            for t in reversed(range(args.num_steps)):
                last = t == args.num_steps - 1
                alive = 1 - (next_done if last else dones[t + 1])
                following = next_value if last else values[t + 1]
                delta = rewards[t] + args.gamma * following * alive - values[t]
                advantages[t] = trace = delta + args.gamma * args.gae_lambda * alive * trace
            returns = advantages + values
        logits, newvalue = agent(obs.flatten(0, 1))
        distribution = Categorical(logits=logits)
        b_advantages = advantages.flatten()
        b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
        loss = (-(b_advantages * distribution.log_prob(actions.flatten())).mean()
                + args.value_coef * (newvalue - returns.flatten()).square().mean()
                - args.entropy_coef * distribution.entropy().mean())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
    gate.iteration()


# CartPole-v1


def greedy_return(choose, episodes=100):
    """Mean return of the likeliest actions over 100 episodes, the same for all sides."""
    import torch
    env = gymnasium.make_vec("CartPole-v1", episodes, "vector_entry_point")
    obs, _ = env.reset(seed=1_000_000)
    alive, returns = np.ones(episodes, bool), np.zeros(episodes)
    with torch.no_grad():
        while alive.any():
            obs, reward, terminated, truncated, _ = env.step(choose(torch.from_numpy(obs)).numpy())
            returns += reward * alive
            alive &= ~(terminated | truncated)
    return returns.mean()


# The parent


def start(options, job):
    """The process of one side."""
    python = options.sb3_python if job["side"].split("-")[0] in ("sb3", "check") else sys.executable
    worker = Worker(__file__, python, job, options.core)
    worker.job = job
    return worker


def compare(options, jobs, blocks):
    """Let the sides take turns through the blocks.  -> rows of the CSV, block 0 too

    jobs: one for each side, with `case` and `block`, the iterations in a block of that side.
    """
    started_at, rows, workers = datetime.datetime.now().isoformat(timespec="seconds"), [], []
    with contextlib.ExitStack() as stack:
        for job in jobs:
            workers.append(start(options, job | dict(iterations=job["block"] * blocks)))
            stack.callback(workers[-1].close)
        for block in range(blocks):
            for worker in in_turn(workers, block):
                job = worker.job
                row = dict(started_at=started_at, block=block, **{name: job[name] for name in FIELDS[1:5]})
                row |= worker.go(job["block"])
                row["env_steps"] = row["iterations"] * job["envs"] * job["steps"]
                rows.append(row)
                print(f"{row['case']:28} {worker.side:16} seed {job['seed']} block {block:2} "
                      f"{row['env_steps'] / row['cpu_s']:8,.0f} steps per CPU s, "
                      f"{row['env_steps'] / row['wall_s']:8,.0f} per s, {row['rss_gib']:.3f} GiB"
                      + (f", greedy {row['greedy']:.1f}" if row["greedy"] else ""), flush=True)
    if options.out:
        path = Path(options.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if not path.stat().st_size:
                writer.writeheader()
            writer.writerows({name: round(value, 4) if isinstance(value, float) else value
                              for name, value in row.items()} for row in rows)
    return rows


def summarise(rows, title, reference):
    """Print the medians over blocks, and of the ratios to the reference of neighbouring turns."""
    blocks = {}
    for row in rows:
        if row["block"]:
            blocks.setdefault((row["case"], row["side"]), []).append(row)
    base = [row["cpu_s"] / row["env_steps"] for row in blocks[reference]]
    print(f"\n| {title} | steps per CPU s | steps per s | times {reference[1]}, {reference[0]} | peak GiB |\n"
          "|---|---|---|---|---|")
    for (case, side), group in blocks.items():
        cpu, wall = (statistics.median(row["env_steps"] / row[name] for row in group)
                     for name in ("cpu_s", "wall_s"))
        ratio = statistics.median(b / (row["cpu_s"] / row["env_steps"])
                                  for b, row in zip(base, group, strict=True))
        print(f"| {case}, {side} | {cpu:,.0f} | {wall:,.0f} | {ratio:.2f} | {group[-1]['peak_gib']:.2f} |")
    print(flush=True)


def job_of(mode, case, side, envs, steps, block, env="pixel-goal", seed=1, **flags):
    return dict(mode=mode, case=case, side=side, envs=envs, steps=steps, block=block, env=env, seed=seed,
                flags=flags)


def pixels(options, mode="pixels"):
    for network in options.networks.split(","):
        flags = dict(network=network, hidden_size=HIDDEN[network])
        check = start(options, job_of(mode, network, "check", 64, 8, 0, **flags) | dict(iterations=0))
        print(check.first["text"], flush=True)
        check.close()
        if not check.first["error"] < 1e-4:
            sys.exit("error: not the same gradient")
        jobs = []
        for side in options.sides.split(","):
            more = dict(dtype="bfloat16") if side == "ours-bfloat16" else {}
            jobs.append(job_of(mode, f"{network} 64 x {options.num_steps}", side, 64, options.num_steps,
                               options.steps // (64 * options.num_steps), **flags, **more))
        rows = compare(options, jobs, 1 + options.repeats)
        sb3 = [side for side in options.sides.split(",") if side.startswith("sb3")] or [jobs[0]["side"]]
        best = min(sb3, key=lambda side: sum(row["cpu_s"] for row in rows if row["side"] == side))
        summarise(rows, "the pixel goal", (jobs[0]["case"], best))


def ppo(options):
    """The default epochs and minibatches; a CleanRL-like loop is not among the sides."""
    options.sides = ",".join(side for side in options.sides.split(",") if not side.startswith("loop"))
    pixels(options, "ppo")


def variants(options):
    for network in options.networks.split(","):
        for dtype in options.dtypes.split(","):
            yield f"{network} {dtype}", dict(network=network, hidden_size=HIDDEN[network], dtype=dtype)


def scale(options):
    for name, flags in variants(options):
        jobs = []
        for size in options.sizes.split(","):
            envs, steps = map(int, size.split("x"))
            jobs.append(job_of("scale", f"{name} {envs} x {steps}", "ours", envs, steps,
                               max(1, options.steps // (envs * steps)), **flags))
        reference = next((job["case"] for job in jobs if job["envs"] == 1024), jobs[0]["case"])
        summarise(compare(options, jobs, 1 + options.repeats), "environments x steps", (reference, "ours"))


def cartpole(options):
    """10 blocks of 50,000 steps, an evaluation after each; block 0 counts."""
    first, last = map(int, options.seeds.split("-"))
    flags = CARTPOLE_FLAGS | json.loads(options.flags)
    envs, steps = flags.pop("num_envs", 8), flags.pop("num_steps", 8)
    rows = []
    for seed in range(first, last + 1):
        jobs = [job_of("cartpole", "CartPole-v1", "sb3", 8, 5, 1250, "CartPole-v1", seed),
                job_of("cartpole", "CartPole-v1", "ours", envs, steps, 50_000 // (envs * steps) // 10 * 10,
                       "CartPole-v1", seed, **flags)]
        rows += compare(options, [job for job in jobs if job["side"] in options.sides.split(",")], 10)
    print("\n| side | seed | CPU s for 500,000 steps | wall s | greedy 500 at | CPU s until then | greedy at "
          "the end |\n|---|---|---|---|---|---|---|")
    for side in dict.fromkeys(row["side"] for row in rows):
        for seed in range(first, last + 1):
            group = [row for row in rows if (row["side"], row["seed"]) == (side, seed)]
            solved = next((i for i, row in enumerate(group, 1) if row["greedy"] >= 500), 0)
            when = f"{sum(r['env_steps'] for r in group[:solved]):,}" if solved else "never"
            print(f"| {side} | {seed} | {sum(r['cpu_s'] for r in group):.1f} | "
                  f"{sum(r['wall_s'] for r in group):.1f} | {when} | "
                  f"{sum(r['cpu_s'] for r in group[:solved]):.1f} | {group[-1]['greedy']:.1f} |")


def atari(options):
    """The published settings of A2C: 16 games, 5 steps, the network of Nature's paper."""
    flags = dict(network="nature", hidden_size=512, learning_rate=7e-4, entropy_coef=0.01, value_coef=0.25,
                 gae_lambda=1.0, normalize_advantages=False, anneal=False)
    case = f"{options.game} 16 x 5"
    jobs = [job_of("atari", case, side, 16, 5, options.steps // 80, options.game, **flags)
            for side in ("sb3", "ours")]
    summarise(compare(options, jobs, 1 + options.repeats), "Atari", (case, "sb3"))


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    modes = dict(pixels=pixels, scale=scale, cartpole=cartpole, atari=atari, ppo=ppo)
    parser.add_argument("mode", choices=(*modes, "worker"))
    parser.add_argument("--repeats", type=int, default=5, help="measured blocks")
    parser.add_argument("--steps", type=int, default=16384, help="environment steps in a block (at least)")
    parser.add_argument("--num-steps", type=int, default=8, help="of `pixels`, `ppo`: steps in a rollout")
    parser.add_argument("--networks", default="small,nature", help="with commas")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of `scale`")
    parser.add_argument("--sizes", default="64x8,64x4,1024x8,1024x4,4096x4,16384x4",
                        help="of `scale`: environments x steps, with commas")
    parser.add_argument("--sides", default=SIDES, help="of `pixels` and `cartpole`, with commas")
    parser.add_argument("--seeds", default="1-3", help="of `cartpole`: first to last")
    parser.add_argument("--flags", default="{}", help="of `cartpole`: flags of a2c_vecenv.py, as JSON")
    parser.add_argument("--game", default="ALE/Pong-v5", help="of `atari`")
    parser.add_argument("--sb3-python", default=str(REPOSITORY / ".venv-sb3/bin/python"))
    parser.add_argument("--core", type=int, default=0, help="the core that all sides are pinned to")
    parser.add_argument("--out", default="", help="CSV file to append each block's measurements to")
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    if options.mode == "worker":
        gate = Gate()
        job = json.loads(sys.stdin.readline())
        side = "ours" if job["mode"] == "scale" else job["side"].split("-")[0]
        dict(ours=work_ours, sb3=work_sb3, check=work_check, loop=work_loop)[side](job, gate)
        return
    if options.mode != "scale":
        check_environment("torch", "gymnasium", "stable_baselines3", "tyro", "pydantic", "ale_py", "cv2",
                          python=options.sb3_python, made_by="sb3")
    if options.mode == "atari":
        check_environment("ale_py", made_by="envs")  # our side
    modes[options.mode](options)


if __name__ == "__main__":
    main()
