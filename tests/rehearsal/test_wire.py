"""What groups of ranks are called in the table of messages."""

from megarlhf.layout import MeshLayout
from megarlhf.rehearsal.timeline.messages import labels_of


def test_a_group_is_called_by_as_few_axes_as_a_layout_allows() -> None:
    """All eight ranks are tp, dp and cp of the first layout together, and tp alone of the second."""
    layouts = {"actor": MeshLayout(tp=2, pp=1, dp=4), "critic": MeshLayout(tp=8, pp=1, dp=1)}
    labels = labels_of(layouts).general
    assert labels[tuple(range(8))] == "tp"
    assert labels[0, 1] == "tp"
    assert labels[0, 2, 4, 6] == "dp"


def test_of_equally_few_axes_the_first_layout_tells() -> None:
    """In general; in a phase of a role its own."""
    layouts = {"actor": MeshLayout(tp=1, pp=1, dp=4), "reward_model": MeshLayout(tp=4, pp=1, dp=1)}
    labels, everyone = labels_of(layouts), (0, 1, 2, 3)
    assert labels.general[everyone] == "dp"
    phases = ("build", "train/actor", "reward", "score/reward_model", "train/critic")
    assert [labels.of(phase, everyone) for phase in phases] == ["dp", "dp", "tp", "tp", "dp"]
    assert labels.of("build", (0, 2)) == "other"


def test_first_and_last_of_more_than_two_stages_share_embeddings() -> None:
    labels = labels_of({"actor": MeshLayout(tp=1, pp=4, dp=1)}).general
    assert (labels[0, 1, 2, 3], labels[0, 3]) == ("pp", "embd")


def test_all_ranks_are_the_world_where_no_layout_says_more() -> None:
    labels = labels_of({"actor": MeshLayout(tp=2, pp=2, dp=2)})
    assert labels.of("optimizer/actor", tuple(range(8))) == "world"
