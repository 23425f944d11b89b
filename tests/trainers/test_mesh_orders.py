"""Which roles stand in the order that vLLM's engines want of the actor. Not covered: that a run then computes the same
(tests/distributed/test_permuted_mesh.py)."""

from types import SimpleNamespace

import pytest

from megarlhf.config import RoleConfig, RolloutConfig
from megarlhf.rollout.factory import mesh_orders

NODE = SimpleNamespace(world_size=8, ranks_per_block=8)
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def sections(**parallel):
    return {
        role: RoleConfig.model_validate({"model": {"path": "none"}, "parallel": sizes})
        for role, sizes in parallel.items()
    }


def rollout(engine, tp):
    return RolloutConfig.model_validate({"engine": engine, "parallel": {"tp": tp}, "max_response_tokens": 8})


def test_a_role_of_the_actor_s_layout_stands_as_the_actor_does():
    """Sequence parallelism asks for no ranks; tp 4 x pp 2 has as many as tp 8, and other groups."""
    roles = sections(
        actor={"tp": 8}, reference={"tp": 8, "sequence_parallel": True}, critic={"tp": 4, "pp": 2}, reward_model={}
    )
    assert mesh_orders(rollout("vllm", 4), roles, NODE) == {
        "actor": ORDER, "reference": ORDER, "critic": None, "reward_model": None
    }  # fmt: skip


@pytest.mark.parametrize(("engine", "tp"), [("vllm", 8), ("megatron", None)])
def test_where_no_order_is_wanted_all_stand_by_number(engine, tp):
    assert mesh_orders(rollout(engine, tp), sections(actor={"tp": 8}, critic={"tp": 8}), NODE) == {
        "actor": None, "critic": None
    }  # fmt: skip
