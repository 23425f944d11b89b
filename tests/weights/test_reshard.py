"""The resharder over a gloo group of four: values, what needs no bucket, memory, and a rank that fails half way. Not
covered: NCCL; a process that dies (its launcher stops the others)."""

import torch
import torch.distributed as dist

from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport import reshard as module
from megarlhf.weights.transport.random_init import fill_random
from megarlhf.weights.transport.reshard import Resharder, TransferError
from tests.ranks import RankPool
from tests.refuses import refuses
from tests.weights.cases import empty, megatron_ranks, tiny, vllm_ranks

CPU = torch.device("cpu")
OPTIONS = {"dtype": torch.bfloat16, "device": CPU, "bucket_bytes": 4096}


def model(rank, tp, seed, dtype=torch.bfloat16):
    """TP2 x PP2 of the trainer, engines of `tp` ranks: plan, sources, empty destinations, what they should be."""
    arch = tiny()
    sources, ranks = megatron_ranks(arch, 2, [[0], [1, 2]]), vllm_ranks(arch, tp, 4 // tp)
    src = empty([sources[rank]], dtype)[rank]
    fill_random(sources[rank], src, seed=seed, std=0.1, arch=arch)
    expected = empty([ranks[rank]], torch.bfloat16, 0.0)[rank]
    fill_random(ranks[rank], expected, seed=seed, std=0.1, arch=arch)
    dst = empty([ranks[rank]], torch.bfloat16, 0.0)[rank]
    return make_plan(sources, ranks, only_rank=rank), src, dst, expected


def assert_equal(actual, expected):
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, different


def messages(resharder, op):
    """Of the last run: those that travel in place, those that need a bucket."""
    kept = resharder._kept
    buckets = {share.untyped_storage().data_ptr() for share in kept.buckets}
    tensors = [op_.tensor for ready in kept.rounds for op_ in ready.ops if op_.op is op]
    staged = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() in buckets]
    return len(tensors) - len(staged), len(staged)


def _values(runtime):
    rank = runtime.rank
    for tp in (1, 2, 4):
        for dtype, direct_bytes in ((torch.bfloat16, 64), (torch.bfloat16, 1 << 30), (torch.float32, 64)):
            plan, src, dst, expected = model(rank, tp, 5, dtype)
            resharder = Resharder(plan, rank=rank, direct_bytes=direct_bytes, **OPTIONS)
            resharder.run(src, dst)
            assert_equal(dst, expected)
            sent_in_place, gathered = messages(resharder, dist.isend)
            received_in_place, scattered = messages(resharder, dist.irecv)
            assert received_in_place
            assert bool(sent_in_place) == (dtype == torch.bfloat16)
            assert gathered if dtype == torch.float32 else scattered or direct_bytes == 64
            # Again, with other values, in other memory.
            _, src, dst, expected = model(rank, tp, 6, dtype)
            resharder.run(src, dst)
            assert_equal(dst, expected)


def test_values_cast_in_place_and_again(ranks: RankPool):
    """What is large and in one run travels from or to where it lies, unless the rank has to cast."""
    ranks.run(4, _values)


def _failing(runtime):
    rank = runtime.rank
    plan, src, dst, expected = model(rank, 2, 5)
    for direct_bytes in (64, 1 << 30):
        resharder = Resharder(plan, rank=rank, direct_bytes=direct_bytes, **OPTIONS)
        for broken_src in (False, True):
            lost = {name: value for name, value in (src if broken_src else dst).items() if "layers.0.mlp" not in name}
            storages = (src, dst) if rank != 1 else (lost, dst) if broken_src else (src, lost)
            with refuses("rank 1: ValueError", "missing", error=TransferError) as error:
                resharder.run(*storages)
            assert "layers.0.mlp" in str(error.value)
            assert ("source" if broken_src else "destination") in str(error.value)
        # Half way: after messages have been sent, at the first copy inside the rank or out of a bucket.
        name = "_copy_inside" if direct_bytes == 64 else "_copy_all"
        kept = getattr(module, name)
        if rank == 1:
            setattr(module, name, lambda *arguments: {}["lost"])
        with refuses("rank 1: KeyError: 'lost'", error=TransferError):
            resharder.run(src, dst)
        setattr(module, name, kept)
        resharder.run(src, dst)
        assert_equal(dst, expected)


def _short_of_memory(runtime):
    rank = runtime.rank
    plan, src, dst, expected = model(rank, 2, 5)

    def free():
        if rank == 2 and broken:
            raise OSError("nobody knows")
        return 1 << 30

    for cause in ("free", "bucket"):
        resharder = Resharder(plan, rank=rank, free_bytes=free, **OPTIONS)
        broken = cause == "free"
        if cause == "bucket" and rank == 2:
            resharder._bucket = lambda rounds: (_ for _ in ()).throw(RuntimeError("out of memory"))
        before = {name: value.clone() for name, value in dst.items()}
        fault = "OSError: nobody knows" if cause == "free" else "RuntimeError: out of memory"
        with refuses(f"rank 2: {fault}", error=TransferError):
            resharder.run(src, dst)
        assert_equal(dst, before)
    broken = False
    if rank == 2:
        del resharder._bucket
    resharder.run(src, dst)
    assert_equal(dst, expected)


def test_a_rank_without_memory_is_told_of_before_anything_is_written(ranks: RankPool):
    ranks.run(4, _short_of_memory)


def test_a_rank_that_fails_stops_all_with_its_reason(ranks: RankPool):
    ranks.run(4, _failing)


def _memory(runtime):
    rank = runtime.rank
    plan, src, dst, expected = model(rank, 2, 5, torch.float32)
    made = []
    real, least = torch.empty, module._MIN_BUCKET_BYTES
    module._MIN_BUCKET_BYTES = 512
    for free, buckets in ((None, 8192), (10**9, 8192), (8192 + rank, 2048)):
        free_bytes = None if free is None else lambda free=free: free
        resharder = Resharder(plan, rank=rank, **{**OPTIONS, "bucket_bytes": 8192}, free_bytes=free_bytes)
        made.clear()
        torch.empty = lambda *a, **k: made.append(real(*a, **k)) or made[-1]
        try:
            resharder.run(src, dst)
        finally:
            torch.empty = real
        assert_equal(dst, expected)
        assert len(made) >= 4
        total = sum(t.numel() * t.element_size() for t in made)
        assert buckets < total <= 2 * buckets, (free, total)
    module._MIN_BUCKET_BYTES = least


def test_buckets_keep_to_their_size_and_to_the_free_memory(ranks: RankPool):
    ranks.run(4, _memory)
