"""A Megatron layout as data: which tensor-, pipeline- and expert-parallel rank holds which part of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import Experts, Head, Spec, megatron_placements
from megarlhf.layout import MeshLayout, split_chunks
from megarlhf.placement import RankPlacements, merge_ranks


@dataclass(frozen=True, order=True, slots=True)
class ModelRank:
    """Coordinates of one model-parallel rank."""

    pp: int
    ep: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class MegatronLayout:
    """How a Megatron run cuts a model; data parallelism only repeats it."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks of each pipeline rank (interleaved schedule)."""
    ep: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each of the pp x vpp virtual stages, in the model's order. Of pp numbers, each is what a pipeline rank
    holds in chunks of equal size. None: equal."""
    padded_vocab: int
    spec: Spec = "local"
    experts: Experts = "each"

    def ranks(self) -> list[ModelRank]:
        """Every model-parallel rank; the position in this list is its number in `parts`."""
        return [ModelRank(pp, ep, tp) for pp in range(self.pp) for ep in range(self.ep) for tp in range(self.tp)]

    def chunk_layers(self, num_layers: int) -> list[list[range]]:
        """Global layer indices of each pipeline rank's chunks: [pp][vpp].

        Raises: ValueError when the stages do not add up, or a rank's layers do not divide into its chunks.
        """
        sizes = self.layers_per_stage
        if sizes is not None and self.vpp > 1 and len(sizes) == self.pp > 1:
            uneven = [size for size in sizes if size % self.vpp]
            if uneven:
                raise ValueError(
                    f"a pipeline stage of {uneven[0]} layers does not divide into vpp = {self.vpp} chunks; choose "
                    "layers_per_stage as multiples of vpp"
                )
            sizes = tuple(size // self.vpp for size in sizes) * self.vpp
        return split_chunks(num_layers, self.pp, self.vpp, sizes)

    def parts(self, arch: Architecture, head: Head = "lm") -> list[RankPlacements]:
        """Contents of each rank of `ranks`; storages of chunk v are prefixed `model{v}.` when vpp > 1.

        Raises: ValueError when the layout does not fit the model.
        """
        return [self.part(arch, head, at, rank) for rank, at in enumerate(self.ranks())]

    def part(self, arch: Architecture, head: Head, at: ModelRank, rank: int = 0) -> RankPlacements:
        """Contents of the rank at `at`, numbered `rank`, over all its chunks. Raises: as `parts`."""
        chunks = self.chunk_layers(arch.num_layers)[at.pp]
        placed = [self.chunk(arch, head, at, v, layers, rank) for v, layers in enumerate(chunks)]
        if self.vpp == 1:
            return placed[0]
        return merge_ranks([chunk.prefixed(f"model{v}.") for v, chunk in enumerate(placed)])

    def on_ranks(self, arch: Architecture, mesh: MeshLayout) -> list[RankPlacements]:
        """Contents of each global rank of a live mesh, data-parallel replicas included, in ascending order.

        Expert parallelism is carved out of context and data parallelism, its rank varying faster.

        Raises: ValueError as `parts`, or when the mesh is not of this layout.
        """
        if (mesh.tp, mesh.pp) != (self.tp, self.pp) or mesh.dp * mesh.cp % self.ep:
            raise ValueError(
                f"a mesh of {mesh} does not carry tp {self.tp}, pp {self.pp}, ep {self.ep}; tp and pp must be equal, "
                "and ep divide dp x cp"
            )
        parts = dict(zip(self.ranks(), self.parts(arch), strict=True))
        experts = replace(mesh, ep=self.ep).expert_layout
        at = [experts.coordinates(rank) for rank in range(mesh.world_size)]
        return [parts[ModelRank(pp=c.pp, ep=c.cp, tp=c.tp)].on_rank(rank) for rank, c in enumerate(at)]

    def chunk(
        self, arch: Architecture, head: Head, at: ModelRank, v: int, layers: range, rank: int = 0
    ) -> RankPlacements:
        """Contents of model chunk `v` with these layers on the rank at `at`, numbered `rank`.

        Raises: ValueError when the layout does not fit the model.
        """
        return megatron_placements(
            arch,
            tp=self.tp,
            tp_rank=at.tp,
            ep=self.ep,
            ep_rank=at.ep,
            layers=layers,
            first_stage=at.pp == 0 and v == 0,
            last_stage=at.pp == self.pp - 1 and v == self.vpp - 1,
            padded_vocab=self.padded_vocab,
            rank=rank,
            head=head,
            spec=self.spec,
            experts=self.experts,
        )
