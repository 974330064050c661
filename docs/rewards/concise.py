"""Among the right answers of a group a longer one earns less; wrong ones earn what they did."""


def concise(rollouts):
    """A right answer of L tokens loses weight x (share of right answers) x (1 - shortest / L).

    shortest: the right answer with the fewest tokens. Where few answers are right, little is lost: a task has
    to be solved before it is solved briefly.
    """
    weight = 0.5  # under 1, so that a right answer earns more than a wrong one, however long it is
    right = [r.num_sampled for r in rollouts if r.correct]
    rewards = []
    for r in rollouts:
        reward = sum(step.reward for step in r.steps)
        if r.correct:
            reward -= weight * len(right) / len(rollouts) * (1 - min(right) / r.num_sampled)
        rewards.append(reward)
    return rewards
