"""vLLM gives weights and cache back while the trainer works, and wakes with the actor's weights.

Not covered: vLLM's own sleep mode, which needs a GPU; here its live tensors lose their memory and get it again.
"""

import pytest

from tests.refuses import missing_names

PROMPTS = [[1, 5, 9, 14, 7, 15], [1, 4, 14, 12, 13, 15]]


@pytest.mark.parametrize(("world_size", "level"), [(1, 1), (2, 2)])
def test_an_engine_sleeps_while_the_trainer_works(world_size, level, ranks, two_layers) -> None:
    paths = str(two_layers["plain"]), str(two_layers["other"])
    found = ranks.run(world_size, "vllm_sleeps", *paths, world_size, level, PROMPTS)[0]
    actor, weights, cache = found["awake"]
    assert min(actor, weights, cache) > 0
    assert found["in rollout"] == [0, weights, cache]
    assert found["in training"] == [actor, 0, 0]
    assert found["in the update"] == [actor, weights, 0], "the cache comes after the weights"
    first, again, second, last = found["said"]
    assert first == again != second == last
    assert found["updates"] == (1 if level == 1 else 2), "weights that are dropped are copied again"
    assert found["host"] == actor + (weights if level == 1 else 0)
    assert not missing_names(found["no room"], "vLLM's weights", "rank 0", "rollout.vllm.gpu_memory_utilization")
