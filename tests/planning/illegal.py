"""A table of starts that are refused: what a file says, in a run of how many ranks, and what is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What a file says, in a run of so many ranks, and the names in the refusal, separated by `|`."""

    command: str
    changes: dict[str, Any]
    world_size: int
    names: str = ""
    device: str = "cpu"
    available: int = 1 << 50
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, what is different in its config.json; `MODEL:name` in `changes` is its directory."""


def actor(command: str = "sft", **parallel: Any) -> dict[str, Any]:
    return {"reward_model" if command == "rm" else "actor": {"parallel": parallel}}


def case(changes: dict[str, Any], world_size: int, names: str = "", command: str = "sft", **others: Any) -> Case:
    return Case(command, changes, world_size, names, **others)


def of_experts(world_size: int, names: str = "", **parallel: Any) -> Case:
    changes = {"actor": {"model": {"path": "MODEL:experts"}, "parallel": parallel}}
    return case(changes, world_size, names, models={"experts": EXPERTS})


def read_only(name: str, **parallel: Any) -> dict[str, Any]:
    return {name: {"model": {"path": "MODEL:model", "random_init": True}, "parallel": parallel}}


def of_model(role: str, name: str, tp: int) -> dict[str, Any]:
    return {role: {"model": {"path": f"MODEL:{name}"}, "parallel": {"tp": tp}}}


VLLM = {"engine": "vllm"}
TRAINED = "trained or sampled from|Leave ranks out|some ranks"
TENSOR = {
    "tp of the heads": case(actor(tp=8), 8, "actor.parallel.tp = 8|12 attention heads|1, 2, 4"),
    "tp of the KV heads": case(actor(tp=3), 3, "actor.parallel.tp = 3|4 KV heads|1, 2, 4"),
    "tp of rows of QKV that share a head": case(
        of_model("actor", "two", 6), 6, "actor.parallel.tp = 6|128 rows of QKV|1, 2, 4",
        models={"two": {"num_key_value_heads": 2, "intermediate_size": 192}}),
    "tp of the MLP": case(of_model("actor", "narrow", 4), 4, "actor.parallel.tp = 4|90 MLP width|1, 2",
                          models={"narrow": {"intermediate_size": 90}}),
    "tp of the critic": case(of_model("critic", "odd", 2), 2, "critic.parallel.tp = 2|3 attention heads", "rl",
                             models={"odd": {"num_attention_heads": 3, "num_key_value_heads": 3}}),
    "tp of nothing": case(actor(tp=0), 1, "actor.parallel.tp|greater than 0|got 0"),
    "sequence_parallel": case(actor(sequence_parallel=True), 1, "sequence_parallel|tp = 1|false"),
    "expert tp": case(actor(etp=2), 2, "unknown key 'actor.parallel.etp'"),
}  # fmt: skip
STAGES = {
    "pp of the layers": case(actor(pp=4), 4, "6 layers|pp = 4|layers_per_stage|4 numbers"),
    "pp beyond the layers": case(actor(pp=8), 8, "6 layers|pp = 8|a pp that divides"),
    "vpp": case(actor(pp=2, vpp=2), 2, "6 layers|pp x vpp = 2 x 2 = 4"),
    "vpp without pp": case(actor(vpp=2), 2, "vpp = 2|pp = 1|vpp to 1"),
    "stages that do not add up": case(
        actor(pp=2, layers_per_stage=[4, 4]), 2, "layers_per_stage = [4, 4]|model's 6 layers|to 8"),
    "stages too few": case(actor(pp=3, layers_per_stage=[3, 3]), 3, "2 numbers|pp = 3|give 3"),
    "virtual stages too few": case(
        actor(pp=2, vpp=2, layers_per_stage=[3, 3]), 2, "2 numbers|pp x vpp = 2 x 2 = 4|give 4"),
    "an empty stage": case(actor(pp=2, layers_per_stage=[0, 6]), 2, "layers_per_stage.0|greater than 0|got 0"),
    "a reward model's stages": case(actor("rm", pp=4), 4, "reward_model.parallel|6 layers|pp = 4", "rm"),
}  # fmt: skip
WORLD = {
    "tp x pp": case(actor(tp=2, pp=2), 6, "world size 6|2 x 1 x 2 = 4|4 or 8 ranks"),
    "a world too small": case(actor(tp=4), 2, "world size 2|4 x 1 x 1 = 4|4 ranks"),
    "tp x cp x pp": case(actor(tp=2, cp=2, pp=3), 18, "tp x cp x pp = 2 x 2 x 3 = 12|12 or 24 ranks"),
    "cp": case(actor(cp=4), 6, "world size 6|1 x 4 x 1 = 4|4 or 8 ranks"),
    "cp beyond the world": case(actor(cp=4), 2, "world size 2|1 x 4 x 1 = 4|4 ranks"),
    "cp of another role": case(
        {"critic": {"parallel": {"cp": 4}}}, 2, "critic.parallel|world size 2|1 x 4 x 1 = 4", "rl"),
    "a batch over dp": case({"train": {"mini_batch_samples": 7}}, 2,
                            "train.mini_batch_samples = 7|actor x train.micro_batch_samples = 2 x 1|6 or 8"),
    "a batch over the reference's dp": case(
        read_only("reference", ranks=5), 6, "ranks of reference|5 x 1 = 5|20 or 25", "rl"),
    "a sequence beyond the budget": case(
        {"train": {"micro_batch_samples": None, "max_tokens_per_micro_batch": 63}, **actor(cp=4)}, 4,
        "64 tokens|train.max_tokens_per_micro_batch = 63|raise it to 64", "rl"),
    "a profile of ranks that are not there": case(
        {"profile": {"steps": [1], "ranks": [2]}}, 2, "profile.ranks|rank 2|2 rank(s)|0 to 1"),
}  # fmt: skip
EXPERT = {
    "ep of a dense model": case(actor(ep=2), 2, "ep = 2|no experts|model_type llama|ep at 1"),
    "ep of the experts": of_experts(3, "ep = 3|4 experts|1, 2, 4", ep=3),
    "ep beyond one rank": of_experts(1, "actor.parallel.ep = 2|multiples of 2", ep=2),
    "ep of dp": of_experts(6, "ep = 4|dp = 6|a divisor of 6|multiples of 4", ep=4),
    "ep of dp x cp": of_experts(6, "ep = 4|dp x cp = 3 x 2|a divisor of 6|of 8", ep=4, cp=2),
    "ep beyond dp": of_experts(2, "ep = 4|dp = 2|multiples of 4", ep=4),
    "experts without sequence_parallel": of_experts(
        2, "tp = 2|sequence_parallel: true|Megatron-Core", tp=2, sequence_parallel=False),
    "one expert a token": case({"actor": {"model": {"path": "MODEL:one"}}}, 1, "one expert|two experts per token",
                               models={"one": {**EXPERTS, "num_experts_per_tok": 1}}),
}  # fmt: skip
RANKS = {
    "out of the world": case(read_only("reference", ranks=8), 2, "ranks = 8|rank 7|0 to 1|8 ranks", "rl"),
    "a range out of the world": case(
        read_only("reference", ranks=[1, 3]), 2, "ranks = [1, 3]|rank 2|0 to 1|start 3", "rl"),
    "an empty range": case(read_only("reference", ranks=[1, 1]), 2, "ranks = [1, 1]|no rank|second larger", "rl"),
    "a list": case(read_only("reference", ranks=[0, 1, 1]), 2, "at most 2 items|[0, 1, 1]", "rl"),
    "a number that tp does not divide": case(
        read_only("reference", ranks=3, tp=2), 4, "3 ranks|2 x 1 x 1 = 2|2 or 4 ranks", "rl"),
    "a number that cp does not divide": case(
        read_only("reference", ranks=3, cp=2), 4, "3 ranks|1 x 2 x 1 = 2|2 or 4 ranks", "rl"),
    "a number below pp": case(read_only("reference", ranks=1, pp=2), 4, "1 ranks|1 x 1 x 2 = 2|2 ranks", "rl"),
    "actor of sft": case(actor(ranks=1), 2, f"actor.parallel.ranks = 1|{TRAINED}"),
    "a reference of dpo": case(read_only("reference", ranks=3), 2, "ranks = 3|rank 2", "dpo"),
    "actor": case(actor("rl", ranks=1), 2, f"actor.parallel.ranks = 1|{TRAINED}", "rl"),
    "critic": case({"critic": {"parallel": {"ranks": [0, 1]}}}, 2, f"critic.parallel.ranks|{TRAINED}", "rl"),
    "reward model that is trained": case(actor("rm", ranks=1), 2, f"reward_model.parallel.ranks|{TRAINED}", "rm"),
    "actor of generate": case(actor(ranks=1), 2, f"actor.parallel.ranks = 1|{TRAINED}", "generate"),
}  # fmt: skip
KEPT = {"offload": {"parameters": False, "optimizer": False}}
POLICIES = {
    "layers without a number": case(
        {"actor": {"recompute": "layers"}}, 1, "recompute = 'layers'|recompute_layers = None|'layers' needs"),
    "a number without layers": case({"actor": {"recompute": "full", "recompute_layers": 2}}, 1, "recompute_layers = 2"),
    "no such recompute": case(
        {"actor": {"recompute": "selective"}}, 1, "'none', 'core_attention', 'layers' or 'full'|'selective'"),
    "no such offload": case({"actor": {"offload": {"optimizer": "disk"}}}, 1, "actor.offload.optimizer|'disk'"),
    "weights cannot be streamed": case(
        {"actor": {"offload": {"parameters": "stream"}}}, 1, "actor.offload.parameters|'stream'"),
    "no such sleep_level": case({"rollout": {"vllm": {"sleep_level": 3}}}, 1, "'auto', 0, 1 or 2|got 3", "rl"),
    "an engine that cannot sleep": case(
        {"rollout": {"vllm": {"sleep_level": 2}}}, 1, "engine = 'megatron'|rollout.vllm.sleep_level=auto", "rl"),
    "an engine of more ranks than there are": case(
        {"rollout": {**VLLM, "parallel": {"tp": 4}}}, 2, "rollout.parallel.tp = 4|2 ranks", "rl", device="cuda"),
    "engines that leave ranks over": case(
        {"rollout": {**VLLM, "parallel": {"tp": 4}}}, 6, "rollout.parallel.tp = 4|6 ranks", "rl", device="cuda"),
    "an engine whose heads do not divide": case(
        {"rollout": {**VLLM, "parallel": {"tp": 3}}}, 3,
        "rollout.parallel.tp = 3|vLLM|128|rollout.engine=megatron", "rl", device="cuda"),
    "the megatron engine's own tp": case({"rollout": {"parallel": {"tp": 2}}}, 2, "parallel.tp|no effect", "rl"),
    "kernels of a GPU": case({"actor": {"kernels": {"logprobs": "triton"}}}, 1, "actor|triton|CPU|auto"),
    # Two roles of 444 thousand parameters whose dtype is not said: 1.7 MiB of weights a rank and 6.7 MiB of moments at
    # least.
    "host memory": case(
        {"actor": {"offload": {"parameters": True, "optimizer": "stream"}},
         "critic": {"offload": {"parameters": True, "optimizer": True}}}, 2,
        "2 rank(s)|actor.offload.parameters|actor.offload.optimizer|critic.offload.parameters|GiB|false",
        "rl", available=8 * MIB),
    "host memory, by default on a GPU": case(
        {}, 1, "actor.offload.parameters|critic.offload.optimizer", "rl", device="cuda", available=8 * MIB),
    "host memory of an engine that sleeps lightly": case(
        {"rollout": {**VLLM, "vllm": {"sleep_level": 1}}, "actor": KEPT, "critic": KEPT}, 2,
        "rollout.vllm.sleep_level|rollout.vllm.sleep_level to 2", "rl", device="cuda", available=MIB),
}  # fmt: skip
CASES = {**TENSOR, **STAGES, **WORLD, **EXPERT, **RANKS, **POLICIES}
