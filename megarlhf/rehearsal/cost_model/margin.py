"""Device memory that a rehearsal cannot see: each item with its formula and its source.

A rehearsal sees every tensor that the program makes. It does not see the memory of the driver, of NCCL and of
libraries, the memory that kernels allocate while they run, and the gaps that the allocator cannot use. Each item here
is a formula of what the rehearsal counted, with numbers that can be set. Items marked "assumed" have no source but
judgement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.architectures.architecture import Architecture
from megarlhf.config import FrozenModel
from megarlhf.config.roles import Fraction, NonNegative
from megarlhf.rehearsal.fake_device.ledger import PhaseMemory
from megarlhf.rehearsal.timeline.messages import Reached
from megarlhf.rehearsal.transformer_engine.replace import Layers

MIB = 2**20
STAYS = (
    "parameters",
    "gradients",
    "main parameters",
    "optimizer state",
    "engine's weights",
    "engine's cache",
    "kernels' work space",
)
"""Kinds of memory that are allocated once and kept. The others come and go, and leave gaps."""


class NcclMargin(FrozenModel):
    """Buffers of NCCL: a communicator has them for each channel of each connection, made at its first use."""

    channels: NonNegative = 24
    """Channels for collectives, which NCCL logs as `coll channels` (NCCL_DEBUG=INFO). A log of 8 GPUs with NVLink SHARP
    shows at least 23 (NVIDIA/nccl#1259)."""
    algorithms: NonNegative = 2
    """Algorithms that a communicator uses (ring and tree or NVLS), each with connections of its own."""
    peer_channels: NonNegative = 32
    """Channels for sends to one rank of the same node, or receives from it (NVIDIA/nccl#1685, 8 H100)."""
    connection_mib: NonNegative = 12
    """Memory of one channel's connection within a node: 10 for receiving, 2 for sending (NVIDIA/nccl#1685). By the
    source: 0.5 + 4.69 + 4 MiB for the protocols LL, LL128 and Simple, in units of 2 MiB (src/init.cc, DEFAULT_BUFFSIZE
    and its neighbours; src/transport/p2p.cc, p2pRecvSetup). NCCL_BUFFSIZE changes the third."""
    network_mib: NonNegative = 512
    """Memory of a communicator that sends to other nodes or receives from them: buffers that its connections share
    (NVIDIA/nccl#2363)."""
    unused_mib: NonNegative = 4
    """Memory of a communicator that was made and never used: assumed."""


class VllmMargin(FrozenModel):
    """Memory of vLLM beside weights and cache. vLLM counts it in its own share, so that its cache is smaller by it."""

    graphs_mib: NonNegative = 1024
    """CUDA graphs, which vLLM measures at start and keeps free of the cache (vllm/v1/worker/gpu_worker.py,
    profile_cudagraph_memory; VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS). Its size is assumed: a start prints it."""
    all_reduce_mib: NonNegative = 24
    """Buffers of its own all-reduce under tensor parallelism: 8 MiB three times
    (vllm/distributed/device_communicators/custom_all_reduce.py)."""
    communicators: NonNegative = 2
    """Communicators of NCCL under tensor parallelism: torch's group and vLLM's own (device_communicators/pynccl.py)."""


class MarginConfig(FrozenModel):
    """Section `margin`: every number of the memory that cannot be seen. MiB are 2^20 bytes."""

    context_mib: NonNegative = 600
    """The driver's context and the code of kernels, loaded as they are used: about 400 MB with lazy loading
    (pytorch/pytorch#109888), 555 MiB on a large Blackwell (ggml-org/llama.cpp#23604). It grows with the number of
    multiprocessors."""
    cublas_mib: NonNegative = 32
    """Workspace of cuBLAS for each stream that multiplies by torch's own products: 32 MiB from Hopper on, 8 MiB before
    (aten/src/ATen/cuda/CublasHandlePool.cpp; CUBLAS_WORKSPACE_CONFIG). TransformerEngine's own is a tensor, which the
    rehearsal counts."""
    streams: NonNegative = 2
    """Streams that multiply: the trainer's and that of the engine's graphs."""
    multiprocessors: NonNegative = 132
    """Multiprocessors of the device: an H100 SXM has 132."""
    kernels_mib: NonNegative = 128
    """Temporaries inside other kernels (sorting, scans, reductions) and thread-local memory: assumed."""
    fragmentation: Fraction = 0.1
    """Share of the memory that comes and goes at the peak: gaps between blocks into which nothing fits, and blocks of 2
    MiB that are not full (c10/cuda/CUDACachingAllocator.h, kRoundLarge). Assumed: a study of training with pipelines
    and recomputation reports up to 43% with torch's default allocator (arXiv 2507.16274); its option
    expandable_segments has less."""
    nccl: NcclMargin = NcclMargin()
    vllm: VllmMargin = VllmMargin()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Counts of a rehearsed rank that the margin depends on. `facts_of` makes it."""

    memberships: int
    """Process groups of the rank. Each has a communicator, made with its first message."""
    groups: int
    """Process groups that have made a collective of device tensors."""
    near_peers: int
    """Ranks of its node with which it exchanges device tensors outside of collectives, in each group."""
    far_groups: int
    """Groups in which it exchanges device tensors with another node outside of collectives."""
    passing_bytes: int
    """Memory that comes and goes, at the peak."""
    tokens: int
    """Tokens of the longest micro-batch; 0 in a phase that trains nothing."""
    heads: int
    kv_heads: int
    """Key-value heads of this rank, in the role that is trained."""
    head_dim: int
    hidden: int
    layer_norm: bool
    """Whether norms have a bias."""
    layers: Layers


@dataclass(frozen=True)
class Item:
    """One item of memory that cannot be seen."""

    name: str
    nbytes: int
    scaling: str
    """Formula, as text."""
    source: str
    before_tensors: bool = False
    """Whether it is allocated before and beside torch's tensors, so that vLLM finds it taken when it starts."""


def facts_of(
    reached: Reached,
    memberships: int,
    phase: PhaseMemory,
    arch: Architecture,
    *,
    tp: int,
    tokens: int,
    layers: Layers,
) -> Facts:
    """Facts of a rank in a phase."""
    return Facts(
        memberships=memberships,
        groups=reached.groups,
        near_peers=reached.near_peers,
        far_groups=reached.far_groups,
        passing_bytes=sum(nbytes for kind, nbytes in phase.by_kind.items() if kind not in STAYS),
        tokens=tokens,
        heads=arch.num_heads // tp,
        kv_heads=max(1, arch.num_kv_heads // tp),
        head_dim=arch.head_dim,
        hidden=arch.hidden_size,
        layer_norm=arch.norm == "layer",
        layers=layers,
    )


def margin(cfg: MarginConfig, facts: Facts) -> list[Item]:
    """All items beside the tensors of a rank in a phase, without vLLM's own (`engine_items`)."""
    return [
        Item("CUDA context", _mib(cfg.context_mib), "a process", "pytorch/pytorch#109888", before_tensors=True),
        *_nccl(cfg.nccl, facts),
        Item(
            "cuBLAS workspaces",
            _mib(cfg.cublas_mib * cfg.streams),
            f"{cfg.streams:g} streams x {cfg.cublas_mib:g} MiB",
            "aten/src/ATen/cuda/CublasHandlePool.cpp",
        ),
        *([_attention(facts), *_norms(cfg, facts)] if facts.tokens else []),
        Item("temporaries inside other kernels", _mib(cfg.kernels_mib), "a device", "assumed"),
        Item(
            "fragmentation",
            int(cfg.fragmentation * facts.passing_bytes),
            f"{cfg.fragmentation:.0%} of the {facts.passing_bytes / 2**30:.1f} GiB that come and go at the peak",
            "assumed; c10/cuda/CUDACachingAllocator.h, arXiv 2507.16274",
        ),
    ]


def engine_items(cfg: MarginConfig, engine_tp: int) -> list[Item]:
    """Items that vLLM takes from its own share of the device, beside weights, activations and cache.

    engine_tp: its tensor-parallel size; 0: the rank has no engine
    """
    if not engine_tp:
        return []
    vllm = cfg.vllm
    items = [Item("CUDA graphs", _mib(vllm.graphs_mib), "an engine", "assumed; vllm/v1/worker/gpu_worker.py")]
    if engine_tp > 1:
        communicator = _communicator_mib(cfg.nccl)
        formula = f"{vllm.communicators:g} communicators x {communicator:g} MiB + {vllm.all_reduce_mib:g} MiB"
        nbytes = _mib(vllm.communicators * communicator + vllm.all_reduce_mib)
        items.append(Item("messages inside an engine", nbytes, formula, "vllm/distributed/device_communicators"))
    return items


def total_bytes(items: Sequence[Item], *, before_tensors: bool = False) -> int:
    """Bytes of all items, or of those that are allocated before and beside tensors."""
    return sum(item.nbytes for item in items if item.before_tensors or not before_tensors)


def _nccl(cfg: NcclMargin, facts: Facts) -> list[Item]:
    communicator = _communicator_mib(cfg)
    unused = max(0, facts.memberships - facts.groups)
    peer = cfg.peer_channels * cfg.connection_mib
    return [
        Item(
            "NCCL: collectives",
            _mib(facts.groups * communicator),
            f"{facts.groups} groups x {cfg.channels:g} channels x {cfg.algorithms:g} algorithms x "
            f"{cfg.connection_mib:g} MiB",
            "NVIDIA/nccl#1685, #964 (544 and 688 MB a group on A100), src/transport/p2p.cc",
            before_tensors=True,
        ),
        Item(
            "NCCL: sends and receives in a node",
            _mib(facts.near_peers * peer),
            f"{facts.near_peers} peers x {cfg.peer_channels:g} channels x {cfg.connection_mib:g} MiB",
            "NVIDIA/nccl#1685",
            before_tensors=True,
        ),
        Item(
            "NCCL: sends and receives between nodes",
            _mib(facts.far_groups * cfg.network_mib),
            f"{facts.far_groups} groups x {cfg.network_mib:g} MiB",
            "NVIDIA/nccl#2363",
            before_tensors=True,
        ),
        Item(
            "NCCL: communicators without a message",
            _mib(unused * cfg.unused_mib),
            f"{unused} groups x {cfg.unused_mib:g} MiB",
            "assumed",
            before_tensors=True,
        ),
    ]


def _communicator_mib(cfg: NcclMargin) -> float:
    return cfg.channels * cfg.algorithms * cfg.connection_mib


def _attention(facts: Facts) -> Item:
    """Work space for the backward of attention, which one layer at a time has."""
    per_token = facts.heads * facts.head_dim
    grouped = facts.heads != facts.kv_heads
    if facts.layers == "te":
        tokens = token_bucket(facts.tokens)
        # Gradients of queries, and of keys and values of each query head where heads share them, in fp32.
        nbytes = tokens * (4 * per_token * (3 if grouped else 1) + 4 * facts.heads)
        formula = f"{tokens} tokens (a bucket of cuDNN's) x {facts.heads} heads x {facts.head_dim} x 4 B"
        formula += ", for gradients of query, key and value" if grouped else ""
        source = "cudnn-frontend, scaled_dot_product_flash_attention.h (dQ_accum, dK_fullhead, softmax_sum)"
        return Item("attention's backward", nbytes, formula, source)
    nbytes = facts.tokens * (4 * per_token + (4 * per_token if grouped else 0) + 4 * facts.heads)
    formula = f"{facts.tokens} tokens x {facts.heads} heads x {facts.head_dim} x 4 B"
    formula += ", twice (key and value in bf16)" if grouped else ""
    source = "aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (dq_accum, dk_expanded, dv_expanded)"
    return Item("attention's backward", nbytes, formula, source)


def token_bucket(tokens: int) -> int:
    """Tokens for which TransformerEngine asks cuDNN (transformer_engine/common/fused_attn/utils.cu, get_max_tokens): at
    least 1024, then the next power of two up to 32,768, then multiples of 32,768."""
    if tokens <= 1024:
        return 1024
    return 1 << (tokens - 1).bit_length() if tokens <= 32768 else -(-tokens // 32768) * 32768


def _norms(cfg: MarginConfig, facts: Facts) -> list[Item]:
    """Partial gradients of a norm's parameters: TransformerEngine sums them over blocks of rows first."""
    if facts.layers != "te":
        return []
    parameters = 2 if facts.layer_norm else 1
    nbytes = int(cfg.multiprocessors * facts.hidden * 4 * parameters)
    formula = f"{cfg.multiprocessors:g} multiprocessors x {facts.hidden} x 4 B" + (" x 2" if facts.layer_norm else "")
    source = "transformer_engine/common/normalization/common.h (dgamma_part)"
    return [Item("norms' backward", nbytes, formula, source)]


def _mib(value: float) -> int:
    return int(value * MIB)
