"""An own advantage: the rank of a response's reward among the responses to its prompt, from -1 (worst) to 1 (best).

Ranks do not depend on the scale of the rewards, and one outlier moves nothing. After `make demo`:

    PYTHONPATH=examples megarlhf rl -c configs/demo/grpo.yaml run.dir=runs/ranks \
        run.on_existing=resume checkpoint.every=1 \
        algo.advantage=own_advantage:rank_in_group
"""

import torch

import megarlhf


@megarlhf.advantage(compares_groups=True)
def rank_in_group(step: megarlhf.AdvantageInputs) -> torch.Tensor:
    """For each response: the share of its siblings that it beats, less the share that beats it."""
    rewards_N, groups_N = step.totals_N, step.groups_N
    siblings_NN = (groups_N[:, None] == groups_N[None, :]).to(rewards_N)
    wins_N = ((rewards_N[:, None] - rewards_N[None, :]).sign() * siblings_NN).sum(1)
    return wins_N / (siblings_NN.sum(1) - 1).clamp(min=1)
