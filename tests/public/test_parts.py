"""Single parts through the public names. Their own tests prove them; here they are used as a user would.

Not covered: GPUs, families other than Llama.
"""

import json

import pytest
import torch

import megarlhf


def test_a_checkpoint_goes_to_megatron_and_back(model, tmp_path):
    """Every tensor bit for bit. A target that exists and a layout that does not fit are refused."""
    there = megarlhf.convert(model, tmp_path / "megatron", to="megatron", tp=2)
    assert (there / "latest_checkpointed_iteration.txt").is_file()
    back = megarlhf.convert(there, tmp_path / "back", to="huggingface")
    assert weights_of(back) == weights_of(model)
    for words, options in {
        "exists": {"to": "huggingface"},
        "fp64": {"to": "megatron", "dtype": "fp64", "force": True},
        "no effect": {"to": "huggingface", "tp": 2, "force": True},
        "huggingface, megatron": {"to": "hf"},
        "tp = 3": {"to": "megatron", "tp": 3, "force": True},
    }.items():
        with pytest.raises(ValueError, match=words):
            megarlhf.convert(model, tmp_path / "back", **options)


def weights_of(directory):
    """Tensors of a safetensors file in the order of their names: 8 bytes of length, a header, data."""
    content = (directory / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: content[start + first : start + last] for name, (first, last) in spans.items()}


def test_a_copy_plan_says_who_sends_what_to_whom(model):
    """From two halves to two whole models each rank gets the other's half, and keeps its own."""
    plan = megarlhf.copy_plan(model, megarlhf.Layout(tp=2), engine_tp=1)
    for rank in range(2):
        other = 1 - rank
        assert list(plan.sends(rank)) == [other]
        assert plan.elements_received(rank) == plan.traffic[other, rank] > 0
        assert plan.elements_received(rank) + plan.traffic[rank, rank] == model_elements(model)
        assert sum(copy.numel for copy in plan.sends(rank)[other]) == plan.elements_sent(rank)
    at_home = megarlhf.copy_plan(model, megarlhf.Layout(tp=2), engine_tp=2)
    assert all(source == destination for source, destination in at_home.traffic)
    for words, arguments in {
        "one of the two": {},
        "do not divide": {"engine_tp": 3},
        "equally many": {"destination": megarlhf.Layout(tp=4)},
    }.items():
        with pytest.raises(ValueError, match=words):
            megarlhf.copy_plan(model, megarlhf.Layout(tp=2), **arguments)


def model_elements(model):
    return sum(len(content) // 4 for content in weights_of(model).values())


def test_packing(model):
    """The example of the docstring by hand: 12 tokens in rows of 5 take three rows, rounded up to two on each rank."""
    rows = megarlhf.pack([3, 4, 4, 1], max_tokens=5, num_ranks=2)
    assert [len(rank) for rank in rows] == [2, 2]
    assert sorted(n for rank in rows for row in rank for n in row) == [0, 1, 2, 3]
    assert max(sum([3, 4, 4, 1][n] for n in row) for rank in rows for row in rank) <= 5
    assert len(megarlhf.pack([2, 2, 2], max_tokens=6, model=model)[0]) == 1
    with pytest.raises(ValueError, match="group 1 has 7 tokens"):
        megarlhf.pack([2, 7], max_tokens=6)


def test_log_probs_of_sampled_tokens():
    """Against torch's log_softmax, in value and gradient; the product with the vocabulary's matrix gives the same."""
    torch.manual_seed(0)
    hidden_TH, weight_VH = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8)
    labels_T = torch.tensor([0, 10, 3, 3, 7])
    expected_T = torch.log_softmax(hidden_TH @ weight_VH.T / 0.7, -1)[torch.arange(5), labels_T]
    logprobs_T, entropy_T = megarlhf.token_logprobs(hidden_TH @ weight_VH.T, labels_T, temperature=0.7)
    linear_T, linear_entropy_T = megarlhf.linear_token_logprobs(hidden_TH, weight_VH, labels_T, temperature=0.7)
    (wanted_TH,) = torch.autograd.grad(expected_T.sum(), hidden_TH, retain_graph=True)
    for got_T in (logprobs_T, linear_T):
        torch.testing.assert_close(got_T, expected_T)
        (got_TH,) = torch.autograd.grad(got_T.sum(), hidden_TH)
        torch.testing.assert_close(got_TH, wanted_TH)
    torch.testing.assert_close(entropy_T, linear_entropy_T)
    with pytest.raises(ValueError, match="label"):
        megarlhf.token_logprobs(torch.randn(1, 4), torch.tensor([4]))


def test_advantages_by_hand():
    """GAE of gamma = 1, lambda = 0.5: A2 = 1 - .5, A1 = .5 A2, A0 = .5 A1; the second sequence is alone. Of two equal
    rewards nothing is learnt."""
    rewards_T, values_T = torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([0.5, 0.5, 0.5, 0.5])
    advantages_T, returns_T = megarlhf.gae(rewards_T, values_T, torch.tensor([0, 3, 4]), gamma=1.0, lam=0.5)
    torch.testing.assert_close(advantages_T, torch.tensor([0.125, 0.25, 0.5, 1.5]))
    torch.testing.assert_close(returns_T, advantages_T + values_T)
    rewards_N, groups_N = torch.tensor([1.0, 3.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1])
    deviation = 2**0.5
    expected_N = torch.tensor([-1 / deviation, 1 / deviation, 0.0, 0.0])
    torch.testing.assert_close(megarlhf.group_relative(rewards_N, groups_N, eps=0.0), expected_N)
    torch.testing.assert_close(megarlhf.leave_one_out(rewards_N, groups_N), torch.tensor([-2.0, 2.0, 0.0, 0.0]))


def test_a_tokenizer(model):
    tokenizer = megarlhf.load_tokenizer(model)
    assert tokenizer.decode(tokenizer.encode("12+3=")) == "12+3="
    with pytest.raises(ValueError, match="no such tokenizer directory"):
        megarlhf.load_tokenizer(model / "nowhere")


def test_a_rehearsal_says_whether_a_job_fits(sft, tmp_path):
    """Of two GPUs that this machine does not have; the same job does not fit into a hundredth of a gibibyte."""
    result = megarlhf.rehearse("sft", sft(), world_size=2, steps=1)
    assert result.runs
    assert 0 < result.free < result.capacity
    assert result.times[-1].seconds > 0
    assert (result.world_size, result.layouts["actor"].split()[:2]) == (2, ["tp", "1"])
    assert not sft()["run"]["dir"].exists()
    with pytest.raises(ValueError, match="cannot be rehearsed"):
        megarlhf.rehearse("eval", sft())
    with pytest.raises(ValueError, match="only 2 steps"):
        megarlhf.rehearse("sft", sft(), steps=3)
