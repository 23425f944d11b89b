"""What groups of ranks are called in the table of messages."""

from __future__ import annotations

from megarlhf.layout import MeshLayout
from megarlhf.parallel.mesh import GROUPS_AXES
from megarlhf.rehearsal.wire import labels_of


def test_a_group_is_called_by_as_few_axes_as_a_layout_allows() -> None:
    """All eight ranks are tp, dp and cp of the first layout together, and tp alone of the second."""
    labels = labels_of([MeshLayout(tp=2, pp=1, dp=4), MeshLayout(tp=8, pp=1, dp=1)], GROUPS_AXES)
    assert labels[tuple(range(8))] == "tp"
    assert labels[0, 1] == "tp"
    assert labels[0, 2, 4, 6] == "dp"


def test_of_equally_few_axes_the_first_layout_tells() -> None:
    labels = labels_of([MeshLayout(tp=1, pp=1, dp=4), MeshLayout(tp=4, pp=1, dp=1)], GROUPS_AXES)
    assert labels[0, 1, 2, 3] == "dp"


def test_first_and_last_of_more_than_two_stages_share_embeddings() -> None:
    labels = labels_of([MeshLayout(tp=1, pp=4, dp=1)], GROUPS_AXES)
    assert (labels[0, 1, 2, 3], labels[0, 3]) == ("pp", "embd")
