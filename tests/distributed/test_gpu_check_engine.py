"""The check of `make test-gpu` with the real vLLM, on a CPU over gloo.

Not covered: TP2 x PP2 into TP2, which needs four ranks (test_rl_vllm.py), GPUs.
"""

from tests.distributed.gpu_check_jobs import PoolStart
from tools.gpu_check import __main__ as command
from tools.gpu_check import checks
from tools.gpu_check.cases import ENGINES, LAYOUTS, Launch, engine_job, write_inputs
from tools.gpu_check.plan import Machine


def test_the_gap_and_the_certificates_of_two_stages_into_two_shards(vllm_ranks, tmp_path) -> None:
    """PP2 into TP2 in bf16: the gap is within the limits, and the digest of the first weights is the stored one, which
    was made at TP1."""
    layout, tp = ENGINES["pp2_to_tp2"]
    num_ranks, parallel = LAYOUTS[layout]
    job = engine_job(write_inputs(tmp_path / "inputs"), tmp_path / "runs", parallel, tp)
    launch = Launch(check="engine", case="pp2_to_tp2", ranks=num_ranks, jobs=[job])
    machine = Machine(gpus_per_node=2, on_gpus=False)
    rows = command.run_launch(launch, tmp_path, PoolStart(vllm_ranks), checks.load_expected(), machine)
    assert [(row.figure, row.status) for row in rows] == [
        ("rollout_logprob_gap_mean", "passed"), ("rollout_logprob_gap_p999", "passed"), ("certificate", "passed")
    ]  # fmt: skip
    assert all(0 < row.measured < row.limit for row in rows[:2]), "a gap of zero compares nothing"
