"""Prices calculated by hand. Not covered: whether a machine keeps to them (`benchmarks/rehearsal/time.py`)."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from megarlhf.rehearsal.cost_model.collectives import Speed, Spread, seconds_by_formula
from megarlhf.rehearsal.cost_model.decoding import EngineShape, RolloutTime, RolloutWork, Sequences
from megarlhf.rehearsal.cost_model.hardware import Hardware
from megarlhf.rehearsal.cost_model.interpolation import Grid, along, between_shares
from megarlhf.rehearsal.cost_model.meter import OperationPricing as WorkPrice
from megarlhf.rehearsal.cost_model.pricing import Pricing
from megarlhf.rehearsal.timeline.simulate import MessagePricing as ReplayPrice
from tests.refuses import refuses
from tests.rehearsal.test_hardware import tree

NODE = tuple(range(8))


def pricing(ranks_per_node: int = 8, **changes: Any) -> Pricing:
    return Pricing(Hardware.model_validate({**tree(), **changes}), ranks_per_node)


def test_it_is_what_meter_and_replay_ask_for():
    work: WorkPrice = pricing()
    replay: ReplayPrice = pricing()
    assert work.operation_seconds("host", 0.0, 8, "float32") == 0.0
    assert replay.message_seconds(0, 1, 0) == 1e-5


# --- operations


def test_a_large_product_takes_its_flops_at_the_peak():
    """2 x 1000^3 = 2e9 operations at 1e12 (efficiency 1 from 1e8 on) are 2 ms; its 6e6 bytes at half of 1e10 are
    1.2 ms."""
    seconds = pricing().operation_seconds("matmul", 2e9, 6_000_000, "bfloat16", (1, 1000, 1000, 1000))
    assert seconds == pytest.approx(2e-3)


def test_a_thin_product_takes_its_bytes():
    """2 x 1000 x 1000 operations and 2e6 bytes: 4e-4 s of bytes, and 2e6 / (1e12 x 0.38) of operations."""
    seconds = pricing().operation_seconds("matmul", 2e6, 2_000_000, "bfloat16", (1, 1, 1000, 1000))
    assert seconds == pytest.approx(4e-4)


def test_efficiency_between_two_sizes_by_logarithms():
    """1e7 lies half-way between 1e6 (0.25) and 1e8 (1): 0.5. Outside as at the nearest."""
    points = [(1e6, 0.25), (1e8, 1.0)]
    assert [between_shares(points, size) for size in (1.0, 1e7, 1e12)] == pytest.approx([0.25, 0.5, 1.0])


def test_attention_and_memory_by_their_efficiencies():
    """1e9 / (1e12 x 0.5) = 2 ms; 1e6 bytes / (1e10 x 0.5) = 0.2 ms."""
    price = pricing()
    assert price.operation_seconds("attention", 1e9, 100, "bfloat16") == pytest.approx(2e-3)
    assert price.operation_seconds("memory", 0.0, 1_000_000, "bfloat16") == pytest.approx(2e-4)
    assert price.operation_seconds("kernel", 0.0, 1_000_000, "float32") == pytest.approx(2e-4)


def test_the_host_runs_ahead_of_a_gpu_and_not_of_a_cpu():
    """5,000 bytes take 1 us, as long as the launch: 1 us on a GPU, 2 us on a CPU; 8 bytes take the launch."""
    gpu, cpu = pricing(), pricing(kind="cpu")
    assert gpu.operation_seconds("memory", 0.0, 5000, "float32") == pytest.approx(1e-6)
    assert cpu.operation_seconds("memory", 0.0, 5000, "float32") == pytest.approx(2e-6)
    assert gpu.operation_seconds("memory", 0.0, 8, "float32") == 1e-6


def test_a_dtype_without_a_peak_is_named():
    with refuses("float16", "bfloat16, float32", "add it"):
        pricing().operation_seconds("matmul", 1e9, 8, "float16", (1, 8, 8, 8))
    assert pricing().peak("float32") == 1e11


# --- measured tables


MEASURED = {
    "source": "by hand",
    "products": [["bfloat16", 1, m, 10, n, 1e-6 * m * n] for m in (10, 1000) for n in (10, 1000)],
    "memory": [["copy", "float32", 100, 1e-6], ["copy", "float32", 10_000, 1e-5], ["math", "float32", 100, 9e-6]],
    "attention": [["float32", "backward", 2, 16, 8, 5e-4]],
}


def test_measured_points_are_met_and_between_them_is_the_geometric_mean():
    price = pricing(kind="cpu", launch={"value": 1e-15, "source": "x"}, measured=MEASURED)

    def product(m: int, n: int) -> float:
        return price.operation_seconds("matmul", 1.0, 1, "bfloat16", (1, m, 10, n))

    assert product(10, 10) == pytest.approx(1e-4)
    assert product(100, 10) == pytest.approx(1e-3)
    assert product(100, 100) == pytest.approx(1e-2)
    assert product(4000, 1000) == pytest.approx(4.0), "beyond the last point in proportion"
    assert product(2, 10) == pytest.approx(1e-4), "below the first point the cost of beginning stays"

    def passes(kind: str, nbytes: int, dtype: str = "float32") -> float:
        return price.operation_seconds("memory", 0.0, nbytes, dtype, None, kind)

    assert passes("copy", 1000) == pytest.approx(math.sqrt(1e-6 * 1e-5))
    assert passes("copy", 100_000) == pytest.approx(1e-4)
    assert passes("math", 100) == pytest.approx(9e-6)
    assert passes("index", 100) == pytest.approx(1e-6), "a kind that was not measured is a copy"
    assert passes("math", 100, "bfloat16") == pytest.approx(9e-6), "a dtype that was not measured is float32"


def test_attention_from_its_table_and_without_one_by_the_roofline():
    price = pricing(kind="cpu", launch={"value": 1e-15, "source": "x"}, measured=MEASURED)
    asked = ("attention", 1e9, 8, "float32", (2, 16, 16, 8))
    assert price.operation_seconds(*asked, "backward") == pytest.approx(5e-4)
    assert price.operation_seconds(*asked, "forward") == pytest.approx(1e9 / (1e11 * 0.5))


def test_a_missing_point_of_a_grid_has_the_speed_of_the_nearest():
    """(100, 100) is missing; (10, 100) at 1000 / 1e-3 is nearest of those measured at equal distance, by order."""
    grid = Grid({(10, 10): 1e-4, (10, 100): 1e-3, (100, 10): 1e-3})
    assert grid.at((100, 100)) == pytest.approx(1e-2)


def test_more_never_costs_less():
    points = [(10.0, 3e-6), (1000.0, 4e-6), (1e6, 9e-4)]
    sizes = [2.0**power for power in range(30)]
    assert all(along(points, small) <= along(points, large) for small, large in pairwise(sizes))
    for price in (pricing(), pricing(measured=MEASURED), pricing(kind="cpu")):
        for operation in ("all_reduce", "all_gather", "broadcast", "all_to_all"):
            seconds = [price.collective_seconds(operation, NODE, int(size), host=False) for size in sizes]
            assert all(small <= large for small, large in pairwise(seconds))
        seconds = [price.operation_seconds("matmul", 2.0 * m * 100, m, "bfloat16", (1, m, 10, 5)) for m in (1, 9, 99)]
        assert all(small <= large for small, large in pairwise(seconds))


# --- communication


def test_a_ring_inside_a_node():
    """8 ranks, 8e6 bytes at 1e9: all_gather 7/8 x 8e-3 + 7 x 1e-5. all_reduce twice the lesser of that and the tree's
    8e-3 + 7e-5."""
    price = pricing()
    assert price.collective_seconds("all_gather", NODE, 8_000_000, host=False) == pytest.approx(7e-3 + 7e-5)
    assert price.collective_seconds("reduce_scatter", NODE, 8_000_000, host=False) == pytest.approx(7e-3 + 7e-5)
    assert price.collective_seconds("all_reduce", NODE, 8_000_000, host=False) == pytest.approx(2 * (7e-3 + 7e-5))
    assert price.collective_seconds("broadcast", NODE, 8_000_000, host=False) == pytest.approx(8e-3 + 7e-5)
    assert price.collective_seconds("all_to_all", NODE, 8_000_000, host=False) == pytest.approx(7e-3 + 1e-5)
    assert price.collective_seconds("barrier", NODE, 0, host=False) == pytest.approx(2 * 7e-5)
    assert price.collective_seconds("all_reduce", (3,), 8_000_000, host=False) == 0.0


def test_over_two_nodes_the_network_counts():
    """16 ranks on 2 nodes of 8: half of 8e6 bytes through 8 cards of 1e8 is 5e-3 s, less than the 15/16 x 8e-3 inside;
    with one rank a node it is 4e6 / 1e8."""
    price, both = pricing(), tuple(range(16))
    latency = 14 * 1e-5 + 1e-4
    assert price.collective_seconds("all_gather", both, 8_000_000, host=False) == pytest.approx(7.5e-3 + latency)
    assert price.collective_seconds("all_gather", (0, 8), 8_000_000, host=False) == pytest.approx(4e-2 + 1e-4)
    assert price.collective_seconds("all_gather", (0, 8), 8_000_000, host=True) == pytest.approx(4e-3 + 1e-5)


def test_a_small_all_reduce_of_many_nodes_goes_through_the_tree():
    """64 nodes of 8, no bytes: 2 x (7 x 1e-5 + 6 x 1e-4), not 2 x 63 steps between nodes."""
    seconds = pricing().collective_seconds("all_reduce", tuple(range(512)), 0, host=False)
    assert seconds == pytest.approx(2 * (7e-5 + 6e-4))


def test_messages_inside_and_between_nodes():
    price = pricing()
    assert price.message_seconds(0, 7, 1_000_000) == pytest.approx(1e-3 + 1e-5)
    assert price.message_seconds(7, 8, 1_000_000) == pytest.approx(1e-2 + 1e-4)


def test_uneven_nodes_are_as_slow_as_the_node_with_the_fewest_ranks():
    assert Spread.of((0, 1, 2, 8), 8) == Spread(ranks=4, nodes=2, fewest=1, most=3)


def test_what_was_measured_corrects_the_formula():
    """Twice as long as the formula for 2 ranks: then 8 ranks are taken to be twice as long as theirs too."""
    inside = Speed(1e9, 1e-5)
    rows = [
        [
            "all_gather",
            2,
            1,
            "device",
            size,
            2 * seconds_by_formula("all_gather", Spread(2, 1, 2, 2), size, inside, inside),
        ]
        for size in (1000, 1_000_000)
    ]
    price = pricing(measured={"source": "x", "collectives": rows})
    for size in (1000, 1_000_000):
        assert price.collective_seconds("all_gather", (0, 1), size, host=False) == pytest.approx(rows[size > 1000][-1])
        formula = pricing().collective_seconds("all_gather", NODE, size, host=False)
        assert price.collective_seconds("all_gather", NODE, size, host=False) == pytest.approx(2 * formula)
    assert price.message_seconds(0, 1, 8) == pricing().message_seconds(0, 1, 8), "no table, no correction"


def test_no_ranks_on_a_node_are_refused():
    with refuses("ranks_per_node", "0", "1 or more"):
        pricing(0)


# --- rollout


SHAPE = EngineShape(
    ranks=(0,), weight_bytes=5_000_000, flops_per_token=1.0, cache_bytes_per_token=1000, num_layers=2, hidden_size=10,
    query_size=10, dtype="bfloat16", itemsize=2,
)  # fmt: skip


def decode(prompts: Sequence[int], responses: Sequence[int], cache_bytes: int, **options: Any) -> RolloutTime:
    """One engine."""
    shape, work = options.pop("shape", SHAPE), Sequences(prompts, responses, computed=options.pop("computed", ()))
    (time,), _ = pricing().decode_seconds(shape, RolloutWork([work]), cache_bytes, **options)
    return time


def test_one_sequence_reads_the_weights_in_every_step():
    """5e6 bytes at half of 1e10 are 1 ms a step; 10 steps, whose cache of 5 + 5.5 tokens adds 10.5e3 bytes each."""
    time = decode([5], [10], 1_000_000)
    assert time.decode == pytest.approx(10 * (5_000_000 + 10_500) / 5e9)
    assert (time.steps, time.most_running) == (10, 1)
    assert time.overhead == pytest.approx(10 * 1e-3)
    assert time.seconds == time.prefill + time.decode + time.overhead


def test_as_many_run_at_once_as_the_cache_holds():
    """Four sequences of 10 tokens: a cache of 20 tokens holds two at a time, one of 40 all; then half as many steps."""
    few = decode([5] * 4, [5] * 4, 20_000)
    many = decode([5] * 4, [5] * 4, 40_000)
    assert (few.steps, few.most_running) == (10, 2)
    assert (many.steps, many.most_running) == (5, 4)
    assert few.seconds > many.seconds
    assert decode([5] * 4, [5] * 4, 40_000, max_running=1).steps == 20


def test_the_longest_response_decides_and_prompts_of_a_group_are_computed_once():
    time = decode([5, 5, 5, 5], [2, 2, 2, 100], 1_000_000, computed=[5, 0, 0, 0])
    assert time.steps == 100
    assert 4 * time.prefill == pytest.approx(decode([5] * 4, [2] * 4, 1_000_000).prefill)


def test_engines_that_pull_end_together_where_fixed_shares_do_not():
    """One sequence at a time, weights of 1 ms a step and 1 ms of overhead: 2 ms a token. One engine begins with 40
    tokens, one with 10, which takes 10, 10 and 10 of the queue meanwhile, and then 5: its cache was shorter."""
    first, queue = ([Sequences([5], [length]) for length in lengths] for lengths in ((40, 10), (10, 10, 10, 5)))
    times, owners = pricing().decode_seconds(SHAPE, RolloutWork(first, queue, most=4), 60_000, max_running=1)
    assert owners == [1, 1, 1, 1]
    assert [time.steps for time in times] == [40, 45]
    both = decode([5] * 3, [40, 10, 10], 60_000, max_running=1)
    assert max(time.seconds for time in times) < both.seconds


def test_an_engine_pulls_to_a_fair_share_at_once_and_not_beyond():
    """Room for all: each begins with one of four and pulls one, which then run side by side."""
    queue = [Sequences([5], [10])] * 2
    times, owners = pricing().decode_seconds(SHAPE, RolloutWork(queue, queue, most=2), 1_000_000)
    assert sorted(owners) == [0, 1]
    assert [(time.steps, time.most_running) for time in times] == [(10, 2), (10, 2)]
    work = RolloutWork([Sequences([], [])], [Sequences([5] * 4, [5] * 4)], most=4)
    shared = pricing().decode_seconds(SHAPE, work, 1_000_000)
    assert shared == ([decode([5] * 4, [5] * 4, 1_000_000)], [0])


def test_what_earlier_weights_drew_is_computed_behind_what_the_cache_has():
    """Two responses to a prompt of 100 tokens go on after 300 more: 400 tokens, and 300 behind 100 others."""
    time = decode([400, 400], [5, 5], 1_000_000, computed=[400, 300])
    alone, behind = (decode([400], [5], 1_000_000, computed=[tokens]).prefill for tokens in (400, 300))
    assert time.prefill == pytest.approx(alone + behind)
    assert 300 / 400 < behind / alone < 1, "attention also reads the 100"


def test_the_time_in_which_sequences_wait_for_the_cache():
    """Two sequences of 10 and 15 tokens run, and a third waits until the first has ended, after 5 of 10 steps; then it
    runs beside the second. With room for all, and where only the batch is full, nothing waits for the cache."""
    few = decode([5] * 3, [5, 10, 5], 25_000)
    first = decode([5] * 2, [5, 5], 25_000)
    assert few.steps == 10
    assert few.waited == pytest.approx(first.decode + first.overhead, rel=1e-6)
    assert decode([5] * 3, [5, 10, 5], 40_000).waited == 0
    assert decode([5] * 3, [5, 10, 5], 40_000, max_running=2).waited == 0


def test_two_ranks_of_an_engine_add_up_twice_in_a_layer():
    """10 elements of 2 bytes: 2 layers x 2 x all_reduce of 20 bytes in each of 3 steps."""
    shape = EngineShape(**{**vars(SHAPE), "ranks": (0, 1)})
    one, two = (decode([5], [3], 1_000_000, shape=each) for each in (SHAPE, shape))
    assert two.decode - one.decode == pytest.approx(3 * 4 * 2 * (1e-5 + 20 / 2 / 1e9))


def test_a_sequence_that_fits_no_cache():
    with refuses("15 tokens", "14 tokens", "14999", "rollout.parallel.tp"):
        decode([5], [10], 14_999)
