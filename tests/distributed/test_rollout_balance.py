"""Two engines of vLLM's share the samples in each way, and say the same, bit for bit.

Not covered: GPUs, where a token's bits may depend on what else is in the batch.
"""

import pytest

from tests.distributed import rollout_jobs

NUM = 2 * len(rollout_jobs.PAIRED)


@pytest.mark.parametrize(("tp", "dtype"), [(1, "fp32"), (2, "bf16")])
def test_the_samples_are_the_same_whoever_draws_them(tp, dtype, vllm_ranks, two_layers) -> None:
    """Engines of one rank, and of two. In the last rollout one engine begins with the longest responses: the other
    takes more of the queue; each rank of an engine answers for its part."""
    world = 2 * tp
    results = vllm_ranks.run(world, rollout_jobs.balanced, str(two_layers["plain"]), tp, dtype)
    whole = results[0]["rows"]["fixed"]
    assert len({len(tokens) for tokens, _, _ in whole}) > 2, "all are equally long"
    owners = {
        name: [sorted(seen["held"][name]) for seen in results] for name in ("fixed", "length", "on_demand", "uneven")
    }
    for seen in results:
        assert all(rows == whole for rows in seen["rows"].values())
        assert seen["idle"] == results[0]["idle"]
    assert all(sorted(row for part in parts for row in part) == list(range(NUM)) for parts in owners.values())
    assert owners["fixed"] != owners["length"]
    drawn = [sum(map(len, owners["uneven"][engine * tp : (engine + 1) * tp])) for engine in (0, 1)]
    begun = len(results[0]["first"])
    assert drawn[0] > drawn[1] >= begun, "the queue was shared evenly, though one engine had far less to do"
    lengths = [sum(len(whole[n][0]) for n in results[0][part]) for part in ("first", "last")]
    assert lengths[0] < lengths[1]
    if tp == 2:
        assert all(abs(len(parts[0]) - len(parts[1])) <= 1 for parts in owners.values())
    assert results[0]["idle"]["uneven"] > 0
