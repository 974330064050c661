"""a2c_vecenv.py: advantages, loss, gradient, actions, metrics, evaluation, by independent formulas."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import a2c_vecenv as a2c
from envs.pixels import RecordEpisodeStatistics, VecEnv, make_vec, row_seeds
from tests.run_folders import records
from tests.stand_ins import install_atari

torch.set_num_threads(1)


def args_for(**flags):
    return a2c.Args(**dict(num_envs=4, num_steps=4, hidden_size=16, log_every=1, checkpoint_every=1,
                           eval_every=0, eval_episodes=4, eval_envs=2) | flags)


def gae_by_sums(rewards, values, next_values, terminated, done, gamma, lam):
    """Eq. 16 as it is printed: A_t = sum over l of (gamma lam)^l delta_{t+l}, up to the episode's end."""
    deltas = rewards + gamma * next_values * ~terminated - values
    advantages = torch.zeros_like(deltas)
    for t, e in np.ndindex(*deltas.shape):
        for later in range(t, len(deltas)):
            advantages[t, e] += (gamma * lam) ** (later - t) * deltas[later, e]
            if done[later, e]:
                break
    return advantages


class Script(VecEnv):
    """Every row as written: a list of (reward, terminated, truncated, observation, final observation)."""

    obs_dtype, obs_shape, num_actions, action_names = torch.float32, (1,), 2, ["0", "1"]
    device = torch.device("cpu")

    def __init__(self, *rows):
        self.rows, self.num_envs, self.seeds = rows, len(rows), []
        self.buffer = torch.zeros(self.num_envs, 1)

    def reset(self, seed):
        self.now = 0
        self.seeds += seed
        return self.buffer.fill_(1.0)

    def step(self, actions):
        reward, terminated, truncated, obs, final = zip(*(row[self.now] for row in self.rows), strict=True)
        self.now += 1
        terminated, truncated = torch.tensor(terminated), torch.tensor(truncated)
        ended = terminated | truncated
        info = {"reset_mask": ended, "final_obs": torch.tensor(final).view(-1, 1)[ended]}
        self.buffer.copy_(torch.tensor(obs).view(-1, 1))
        return self.buffer, torch.tensor(reward), terminated, truncated, info


class Double(torch.nn.Module):
    """V(s) = 2 s, learnable; both actions alike."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, obs):
        return torch.zeros(len(obs), 2), self.weight * obs[:, 0]


def played(*rows, **flags):
    """A rollout of scripted rows. -> what came of it, the observation after it"""
    args = args_for(num_steps=len(rows[0]), num_envs=len(rows), **flags)
    env = RecordEpisodeStatistics(Script(*rows))
    obs, batch = a2c.rollout(Double(), env, env.reset(0), args)
    return batch, obs


NAN = math.nan
CUT = [(1.0, False, False, 3.0, NAN), (2.0, False, True, 50.0, 7.0), (3.0, False, False, 4.0, NAN)]
END = [(1.0, False, False, 3.0, NAN), (2.0, True, False, 50.0, 70.0), (3.0, False, False, 4.0, NAN)]
BOTH = [(1.0, False, False, 3.0, NAN), (2.0, True, True, 50.0, 7.0), (3.0, False, False, 4.0, NAN)]
LAST = [(1.0, False, False, 3.0, NAN), (2.0, False, False, 5.0, NAN), (3.0, False, True, 60.0, 9.0)]


def returns_of(batch, gamma=0.5):
    values = batch["values"].detach()
    return a2c.gae(batch["rewards"], values, batch["next_values"], batch["terminated"], batch["reset_mask"],
                   gamma, 1.0) + values


def test_a_time_limit_bootstraps_from_the_last_observation_not_from_the_next_episodes_first():
    """V of the final observation 7 is 14, that of the first of the next episode, 50, would be 100."""
    batch, obs = played(END, CUT, BOTH, LAST)
    after = 3 + 0.5 * 8
    assert returns_of(batch).T.tolist() == [
        [1 + 0.5 * 2, 2, after],
        [1 + 0.5 * (2 + 0.5 * 14), 2 + 0.5 * 14, after],
        [1 + 0.5 * 2, 2, after],  # the episode is over, even if its time was up at that very step
        [1 + 0.5 * (2 + 0.5 * (3 + 0.5 * 18)), 2 + 0.5 * (3 + 0.5 * 18), 3 + 0.5 * 18]]
    assert batch["values"].T.tolist() == [[2, 6, 100]] * 3 + [[2, 6, 10]]
    assert batch["next_values"][0].tolist() == [6, 6, 6, 6]
    assert obs.flatten().tolist() == [4, 4, 4, 60]
    batch, _ = played(CUT, bootstrap_truncated=False)
    assert returns_of(batch).flatten().tolist() == [1 + 0.5 * 2, 2, after]


class Watch:
    """Runs a2c.main and keeps what passes through its functions."""

    def __init__(self, folder, **flags):
        self.batches, self.losses, self.gradients, self.clipped = [], [], [], []
        rollout, loss, clip = a2c.rollout, a2c.a2c_loss, torch.nn.utils.clip_grad_norm_

        def watched_rollout(agent, *rest):
            self.agent = agent
            result = rollout(agent, *rest)
            self.batches.append({name: tensor.detach().clone() for name, tensor in result[1].items()})
            return result

        def watched_loss(logprobs, entropies, values, advantages, returns, *coefficients):
            result = loss(logprobs, entropies, values, advantages, returns, *coefficients)
            self.losses.append((advantages.clone(), returns.clone(), *coefficients))
            parameters = list(self.agent.parameters())
            self.gradients.append(flat(torch.autograd.grad(result[0], parameters, retain_graph=True)))
            return result

        def watched_clip(parameters, *rest):
            parameters = list(parameters)
            self.clipped.append(flat([p.grad for p in parameters]))
            return clip(parameters, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(a2c, "rollout", watched_rollout)
            patch.setattr(a2c, "a2c_loss", watched_loss)
            patch.setattr(torch.nn.utils, "clip_grad_norm_", watched_clip)
            a2c.main(args_for(**dict(env_id="CartPole-v1", run_dir=str(folder)) | flags))
        self.records = records(folder)


# Episodes are won, and cut by their time limit.
ENDS = dict(env_id="pixel-goal", num_envs=24,
            env_kwargs=("difficulty=2", "k_consecutive=1", "max_steps=6", "menu_prob=0"))


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_the_loss_is_that_of_torch_distributions():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, 4, generator=g, dtype=torch.float64).requires_grad_()
    values = torch.randn(5, 3, generator=g, dtype=torch.float64).requires_grad_()
    actions = torch.randint(4, (5, 3), generator=g)
    advantages, returns = torch.randn(2, 5, 3, generator=g, dtype=torch.float64)
    policy = torch.distributions.Categorical(logits=logits)
    policy_loss = -(advantages * policy.log_prob(actions)).sum() / 15
    value_loss = torch.nn.functional.mse_loss(values, returns)
    expected = policy_loss + 0.3 * value_loss - 0.07 * policy.entropy().mean()
    log_pi = logits.log_softmax(-1)
    ours = a2c.a2c_loss(log_pi.gather(-1, actions[..., None]).squeeze(-1), -(log_pi.exp() * log_pi).sum(-1),
                        values, advantages, returns, 0.3, 0.07)
    torch.testing.assert_close(torch.stack(ours), torch.stack([expected, policy_loss, value_loss]))
    for one, other in zip(torch.autograd.grad(ours[0], (logits, values)),
                          torch.autograd.grad(expected, (logits, values)), strict=True):
        torch.testing.assert_close(one, other)


def lively_agent(env, scale=30.0):
    """Weights whose policy is far from uniform, so that gradients say something."""
    torch.manual_seed(7)
    agent = a2c.Agent(env, "small", 16)
    with torch.no_grad():
        agent.policy.weight *= scale
    return agent


def update_gradient(second_pass=False, **flags):
    """The float64 gradient of an update on the pixel goal. second_pass: from copies of the observations."""
    env = RecordEpisodeStatistics(make_vec("pixel-goal", 12, max_steps=5, stack_k=2, goal_in_obs=True,
                                           pack="2bpp"))
    args = args_for(num_steps=6, **flags)
    agent, step = lively_agent(env).double(), env.step
    agent.scale = lambda obs, scale=agent.scale: scale(obs).double()
    observations = [env.reset(3).clone()]

    def copied(actions):
        result = step(actions)
        observations.append(result[0].clone())
        return result[0], result[1].double(), *result[2:]

    torch.manual_seed(11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env, "step", copied)
        _, batch = a2c.rollout(agent, env, env.reset(3), args)
    if second_pass:
        policies, predicted = zip(*(agent(obs) for obs in observations[:6]), strict=True)
        policy = torch.distributions.Categorical(logits=torch.stack(policies))
        batch |= dict(logprobs=policy.log_prob(batch["actions"]), entropies=policy.entropy(),
                      values=torch.stack(predicted))
    advantages = returns_of(batch, 0.99) - batch["values"].detach()
    loss, _, _ = a2c.a2c_loss(batch["logprobs"], batch["entropies"], batch["values"], advantages,
                              returns_of(batch, 0.99), 0.5, 0.01)
    loss.backward()
    return flat([p.grad for p in agent.parameters()]), batch


def difference(one, other):
    return float((one - other).norm() / one.norm())


def test_the_gradient_is_that_of_a_second_forward_pass_whatever_the_chunks(monkeypatch):
    """The environment overwrites its observations; the kept graph must not have held on to them."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # else the bound is one of rounding
    (second, batch), names = update_gradient(second_pass=True), ("logprobs", "entropies", "values")
    assert batch["truncated"].any() and len(batch["actions"].unique()) > 4 and batch["entropies"].std() > 0.01
    for flags in ({}, dict(chunk=5), dict(chunk=1)):
        found, again = update_gradient(**flags)
        assert torch.equal(batch["actions"], again["actions"])
        assert difference(second, found) < 1e-12, flags
        torch.testing.assert_close(*({name: kept[name] for name in names} for kept in (batch, again)))


# A lost life is terminated, though the episode goes on.
LIVES = dict(env_id="ALE/Dice-v5", num_envs=3, env_kwargs=("screen_size=20", "max_episode_frames=28"))


@pytest.mark.parametrize("ends", [ENDS, LIVES])
def test_advantages_are_those_of_gae_and_normalised_while_returns_are_not(ends, tmp_path, monkeypatch):
    install_atari(monkeypatch)
    gamma, lam = 0.9, 0.8
    flags = ends | dict(iterations=1, num_steps=12, gamma=gamma, gae_lambda=lam)
    plain, normal = (Watch(tmp_path / str(on), normalize_advantages=on, **flags) for on in (False, True))
    (advantages, returns, *_), (normalised, same, *_) = plain.losses[0], normal.losses[0]
    batch, names = plain.batches[0], ("rewards", "values", "next_values", "terminated")
    assert batch["terminated"].any() and (batch["truncated"] & ~batch["terminated"]).any()
    assert (batch["terminated"] & ~batch["reset_mask"]).any() == (ends is LIVES)
    expected = gae_by_sums(*(batch[name] for name in names), batch["terminated"] | batch["truncated"],
                           gamma, lam)
    torch.testing.assert_close(advantages, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(returns, advantages + batch["values"])
    torch.testing.assert_close(same, returns)
    torch.testing.assert_close(normalised, (advantages - advantages.mean()) / advantages.std(), rtol=1e-4,
                               atol=1e-5)


def test_a_step_is_adams_with_the_eps_of_the_paper(tmp_path):
    """The second step, from the first one's checkpoint; a gradient clipped to so little that eps counts."""
    watch = Watch(tmp_path / "run", iterations=2, checkpoint_every=1, keep_checkpoints=0, log_every=1,
                  max_grad_norm=1e-3, learning_rate=0.01)
    folders = [tmp_path / "run" / "checkpoints" / f"step_00000{n}" for n in (1, 2)]
    before, after = (torch.load(folder / "trainer_state.pt") for folder in folders)
    moments = before["optimizer"]["state"].values()
    m, v = (flat([moment[name] for moment in moments]) for name in ("exp_avg", "exp_avg_sq"))
    g = watch.clipped[1] * 1e-3 / watch.clipped[1].norm()
    m, v = (0.9 * m + 0.1 * g) / (1 - 0.9**2), (0.999 * v + 0.001 * g**2) / (1 - 0.999**2)
    moved = flat(after["agent"].values()) - flat(before["agent"].values())
    expected = -0.005 * m / (v.sqrt() + 1e-5)
    assert watch.clipped[1].norm() > 1e-3 and difference(expected, moved) < 1e-3


def test_actions_come_as_often_as_the_policy_says():
    """Chi-square of 50,000 draws from each of three policies; 5 degrees of freedom, p = 0.001 at 20.5."""
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 0, 0, 0, 0, 0], [2.0, -1, 0.5, 3, 0, 1], [-60.0, 1, 1, 4, -2, -100]])
    n = 50_000
    actions, others = (a2c.choose_actions(logits.repeat(n, 1)).view(n, 3) for _ in range(2))
    for row in range(3):
        counts = torch.bincount(actions[:, row], minlength=6).double()
        expected = n * logits[row].double().softmax(-1)
        likely = expected > 1
        assert counts[~likely].sum() == 0
        statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
        assert statistic < 20.5, (row, counts, expected)
    pairs = torch.bincount(actions[:, 0] * 6 + others[:, 0])
    assert pairs.min() > 0.9 * n / 36  # the next draw is another one
    assert torch.equal(a2c.choose_actions(logits[1:], greedy=True), logits[1:].argmax(-1))


def test_vectors_get_a_perceptron_and_shades_are_scaled():
    env, pixels, seen = make_vec("CartPole-v1", 3), make_vec("pixel-goal", 2), []
    agent = a2c.Agent(env, "nature", 32)
    linear = [layer for layer in agent.body if isinstance(layer, torch.nn.Linear)]
    assert [layer.weight.shape for layer in linear] == [(32, 4), (32, 32)]
    assert [output.shape for output in agent(env.reset(0))] == [(3, 2), (3,)]
    agent = a2c.Agent(pixels, "small", 16)
    agent.body.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    agent(pixels.reset(0))
    assert seen[0].max() == 1 and len(seen[0].unique()) <= 4


def test_the_network_that_acts_at_first_acts_at_random():
    env = make_vec("pixel-goal", 32)
    agent = a2c.Agent(env, "small", 64)
    assert agent(env.reset(0))[0].softmax(-1).sub(1 / 8).abs().max() < 0.02
    for layer, gain in ((agent.policy, 0.01), (agent.value, 1.0),
                        *((layer, math.sqrt(2)) for layer in agent.body if hasattr(layer, "weight"))):
        weight = layer.weight.detach().flatten(1)
        rows = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
        torch.testing.assert_close(rows, gain**2 * torch.eye(len(rows)), rtol=1e-4, atol=1e-4 * gain**2)
        assert not layer.bias.any()


def test_records_are_what_numpy_makes_of_the_rollouts(tmp_path):
    watch = Watch(tmp_path / "run", iterations=6, log_every=3, checkpoint_every=3, **ENDS)
    for index, record in enumerate(watch.records):
        part = slice(3 * index, 3 * index + 3)
        window = {name: np.stack([batch[name].double().numpy() for batch in watch.batches[part]])
                  for name in watch.batches[0]}
        last, done = watch.batches[part][-1], window["terminated"] + window["truncated"] > 0
        assert done.any() and window["terminated"].any() and window["truncated"].any()
        expected = dict(
            reward_mean=window["rewards"].mean(), done_rate=window["terminated"].mean(),
            trunc_rate=window["truncated"].mean(), reset_rate=done.mean(),
            success_rate=window["terminated"].sum() / done.sum(), entropy_mean=window["entropies"].mean(),
            episode_return=window["episode_return"].sum() / done.sum(),
            episode_length=window["episode_length"].sum() / done.sum(),
            grad_norm=np.mean([float(gradient.norm()) for gradient in watch.clipped[part]]))
        dist = last["dist"].numpy()
        for level in (10, 50, 90):
            expected[f"dist_p{level}"] = np.percentile(dist, level)
            expected[f"reward_p{level}"] = np.percentile(last["rewards"].numpy(), level)
        returns, values = watch.losses[part][-1][1].numpy(), last["values"].numpy()
        expected |= dict(value_mean=values.mean(), value_std=values.std(), value_min=values.min(),
                         value_max=values.max(),
                         explained_variance=1 - np.var(returns - values) / np.var(returns))
        for name, value in expected.items():
            assert record[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
        counts = np.bincount(window["actions"].astype(int).ravel(), minlength=8)
        assert record["action_hist"] == counts.tolist() and sum(record["action_hist"]) == 3 * 24 * 4
        lengths = window["episode_length"][done]
        assert lengths.min() >= 1 and lengths.max() == 6
    assert [record["env_steps"] for record in watch.records] == [3 * 24 * 4, 6 * 24 * 4]
    losses = [(float(-(batch["logprobs"] * advantages).mean()),
               float((batch["values"] - returns).square().mean()))
              for batch, (advantages, returns, *_) in zip(watch.batches, watch.losses, strict=True)]
    policy_loss, value_loss = np.mean(losses[:3], axis=0)
    assert watch.records[0]["policy_loss"] == pytest.approx(policy_loss, abs=1e-5)
    assert watch.records[0]["value_loss"] == pytest.approx(value_loss, rel=1e-4)


@pytest.mark.parametrize("num_envs, episodes", [(4, 10), (6, 3)])
def test_an_evaluation_is_exactly_so_many_episodes_and_each_environment_plays_its_share(num_envs, episodes):
    """Short ones are not preferred: row i ends every i + 2 steps, by itself if i is even; 1 a step."""
    def step(row, time):
        ends = time % (row + 2) == 0
        return 1.0, ends and row % 2 == 0, ends and row % 2 == 1, 0.0, 0.0

    shares = [episodes // num_envs + (row < episodes % num_envs) for row in range(num_envs)]
    lengths = [(row + 2, row % 2 == 0) for row in range(num_envs) for _ in range(shares[row])]
    successes = sorted(length for length, success in lengths if success)
    expected = (len(successes) / episodes, successes[(len(successes) - 1) // 2] if successes else 0,
                sum(length for length, _ in lengths) / episodes)
    env = RecordEpisodeStatistics(
        Script(*([step(row, time) for time in range(1, 60)] for row in range(num_envs))))
    args = args_for(eval_episodes=episodes, eval_envs=num_envs)
    env.has_goal = True
    for prefix, greedy in (("eval/greedy_", True), ("eval/", False)):
        found = a2c.evaluate(Double(), env, args, greedy)
        names = [prefix + name for name in ("success_rate", "steps", "return")]
        assert [found[name] for name in names] == pytest.approx(expected) and len(found) == 3
    assert not set(env.seeds) & set(row_seeds(args.seed, range(16_384)))  # no start that training begins with
    env.has_goal = False
    found = a2c.evaluate(Double(), env, args)
    assert list(found.values()) == pytest.approx([0.0, 0.0, expected[2]])


def test_evaluations_are_alike_whenever_they_happen():
    args = args_for(eval_episodes=9, eval_envs=4)
    env = RecordEpisodeStatistics(make_vec("pixel-goal", 4, difficulty=6, max_steps=20))
    agent = lively_agent(env, scale=3.0)
    told = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        told.append([a2c.evaluate(agent, env, args, greedy) for greedy in (False, True)])
        env.step(torch.zeros(4, dtype=torch.int64))
    assert told[0] == told[1] and [*told[0][0].values()] != [*told[0][1].values()]


def test_an_evaluation_disturbs_no_training_whose_iterations_draw_actions_of_their_own(tmp_path):
    """By a policy that stays near to uniform, whatever it sees."""
    flags = dict(iterations=2, learning_rate=0.0, num_steps=50)
    often, never = (Watch(tmp_path / str(every), eval_every=every, **flags) for every in (1, 0))
    assert ["eval/return" in record for record in often.records] == [True, True]
    assert ["eval/return" in record for record in never.records] == [False, True]
    for one, other in zip(often.batches, never.batches, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(one, other) for one, other in zip(often.clipped, never.clipped, strict=True))
    first, second = (batch["actions"] for batch in never.batches)
    assert 0.3 < (first == second).double().mean() < 0.7


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a GPU."""

    found = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        waits = ("_local_scalar_dense", "nonzero", "masked_select")
        self.found += any(name in str(function) for name in waits)
        return function(*arguments, **options or {})


def test_a_record_crosses_to_the_host_once(tmp_path, monkeypatch):
    """By one tolist and nothing else: two records wait for a GPU once more than one record does."""
    found, lists, tolist = {}, [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (lists.append(self.shape), tolist(self))[1])
    for every in (1, 2):
        lists.clear()
        with Waits() as waits:
            a2c.main(args_for(run_dir=str(tmp_path / f"{every}"), env_kwargs=("max_steps=9",), iterations=2,
                              log_every=every, checkpoint_every=2))
        found[every] = waits.found, len(lists)
    assert found[1] == (found[2][0], found[2][1] + 1) and found[2][0] > 0, found
