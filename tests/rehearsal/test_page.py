"""The page and the file of a rehearsal's answer. Not covered: how it looks, and what its script does (both were seen in
a browser when they were written)."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import plotly.graph_objects as go
import pytest

from megarlhf.rehearsal.fake_device.origins import KINDS, OTHERS
from megarlhf.rehearsal.report.curve import COLOURS, UNKNOWN, colours_of, memory_curve, thinned
from megarlhf.rehearsal.report.page import MAX_POINTS, MAX_RANKS, render, write
from megarlhf.rehearsal.report.sentences import size
from tests.refuses import missing_names, refuses
from tests.rehearsal.results import GIB, a_result, rank_of, too_small

SCRIPTS = re.compile(r"<script>.*?</script>", re.DOTALL)


@pytest.fixture(scope="module")
def page():
    return render(a_result(points=12))


def text_of(page):
    """Without scripts, style and tags."""
    page = re.sub(r"<style>.*?</style>", "", SCRIPTS.sub("", page), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def figures_of(page):
    return json.loads(re.search(r"const FIGURES = (.*);\n", page).group(1))


class _Tags(HTMLParser):
    """Collects what a browser would fetch, and how often each tag opens and closes."""

    def __init__(self):
        super().__init__()
        self.fetched, self.depth = [], {}

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        self.depth[tag] = self.depth.get(tag, 0) + 1

    def handle_endtag(self, tag):
        self.depth[tag] -= 1


FACTS = (
    "It fits, with 4.80 GiB to spare beyond the margin.",
    "Rank 0 (stage 0 of all roles) is the tightest of 8 rehearsed ranks. It needs 74.36 of 79.16 GiB",
    "GiB: 68.96 GiB of tensors in reshard in step 2, and a margin of 5.40 GiB.",
    "Nothing here was measured on a GPU.",
    "At its tightest moment it holds, in GiB: engine&#39;s cache 22.50, engine&#39;s weights 16.40",
    "docs/rehearsal-gpu.md",
    "reshard 16.70 60.80 16.70 16.70 68.96 16.70",  # first step, later step: begins, peak, ends
    "NCCL: collectives 2.81 5 groups x 24 channels x 2 algorithms x 12 MiB NVIDIA/nccl#1685",
    "train/actor all_gather tp 8 inside a node 4160 540 GB 4160 540 GB",
    "0 stage 0 of all roles 17,211 2.16 TB 154 GB 120 kB 212 23",
    "received by a rank, most 16.7 GB",
    "tokens trained per second, whole job 8,123 8,123",
    "model FLOPs utilisation, rollout apart 37.2% 37.2%",
    "rollout, slowest engine, seconds 210 204",
    "Rank 0 also writes 123.4 MB of responses that are under way.",
    "tokens of prompts, and of responses that go on 0 2,345,678",
    "Responses wait for room in an engine&#39;s cache during 12.5 of 204 s",
    "train/actor 96 67.2 19.2 9.6 14.4 0 31,000 41.3%",
    "a node of 8 ranks 40.00",
    "megarlhf/parallel/step.py:301 in gradient_norm aten._local_scalar_dense of float32 1.0",
    "The tokenizer is stood in for: none stands at models/llama-3-70b.",
    "memory_bandwidth a datasheet",
    "world_size: 64",
    "megarlhf/rehearsal/fakes/engine.py:140 in _cache",
)


def test_the_page_has_every_fact_in_its_section(page):
    """Figures by hand: rank 0 holds 68.96 GiB at its peak, and 600 + 5 x 576 + 2048 MiB of margin are 5.40 GiB."""
    text = text_of(page)
    assert [fact for fact in FACTS if fact not in text] == []
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        *("Memory over the steps", "Memory by phase", "Ranks", "The margin", "The wire", "Time (estimate)"),
        *("Host memory", "What was assumed", "Resolved configuration"),
    ]


def test_it_opens_without_a_network_and_its_tags_are_closed(page):
    tags = _Tags()
    tags.feed(page)
    assert tags.fetched == []
    assert {tag: depth for tag, depth in tags.depth.items() if depth} == {"meta": 2}
    assert not re.search(r"@import|url\(", re.search(r"<style>(.*?)</style>", page, re.DOTALL).group(1))
    assert page.count("const FIGURES") == 1


def test_no_name_and_no_figure_of_a_device_is_ours(page):
    """Whatever device the page speaks of is the hardware file's."""
    assert "machine of the test" in page
    assert not re.search(r"\b[ABH][12]00\b|NVLink|InfiniBand|80 ?GB", text_of(page))


PLAIN = a_result(points=2)
OTHER_RESULTS = {
    "too small": (too_small(PLAIN, gib=74.0), ("not fit", "0.36 GiB", "4 of 8"), ("It fits",)),
    "no size of the device": (replace(PLAIN, capacity=0), ("No size of a device",), ("less the margin", "-74.36")),
    "no times, no plan": (
        replace(PLAIN, times=[], rollouts=[], reshard=None), ("no step was replayed", "No weights"), ("utilisation",),
    ),
    "refused": (
        replace(PLAIN, fits=False, refusals=["no room for <b>weights</b>"], faults=["rank 0 waits for rank 8"]),
        ("not start", "1 reason", "no room for &lt;b&gt;weights&lt;/b&gt;", "rank 0 waits for rank 8"),
        ("It fits",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_RESULTS)
def test_results_of_other_kinds(name):
    result, expected, absent = OTHER_RESULTS[name]
    page = render(result)
    assert ('class="panel alarm"' in page) == (name == "refused")
    assert [words for words in expected if words not in text_of(page)] == []
    assert [words for words in absent if words in text_of(page)] == []


def test_what_is_text_stays_text():
    evil = "</script><img src=x>"
    ranks = [
        replace(
            rank,
            why=evil,
            curve=[(seconds, {evil: sum(kinds.values())}) for seconds, kinds in rank.curve],
            phases_at=[(seconds, step, evil) for seconds, step, _ in rank.phases_at],
        )
        for rank in PLAIN.ranks
    ]
    page = render(replace(PLAIN, ranks=ranks, notes=[evil], hardware=evil, config={"a": evil}, layouts={evil: evil}))
    tags = _Tags()
    tags.feed(page)
    assert tags.fetched == []
    assert evil not in page
    assert evil in [trace["name"] for trace in figures_of(page)[0]["data"]]  # it was there to be escaped


def test_thinning_keeps_the_peak_of_every_phase():
    """A spike of one point in each of 20 phases of 1000."""
    points = []
    for number in range(20_000):
        spike = number % 1000 == 137
        points.append((number * 0.01, {"activations": 10_000 + number // 1000 if spike else number % 7}))
    borders = [phase * 10.0 for phase in range(20)]
    kept = thinned(points, borders, 200)
    assert len(kept) <= 200 + 2 * len(borders)
    peaks = [max(kinds["activations"] for seconds, kinds in kept if start <= seconds < start + 10) for start in borders]
    assert peaks == [10_000 + phase for phase in range(20)]
    assert [seconds for seconds, _ in kept] == sorted(seconds for seconds, _ in kept)
    assert min(kinds["activations"] for _, kinds in kept) == 0
    assert thinned(points[:150], borders, 200) == points[:150]


def test_a_curve_keeps_within_its_points_and_its_colours():
    rank = rank_of(0, 0, points=400)
    assert len(rank.curve) > 2 * MAX_POINTS
    drawn = memory_curve(rank, int(79.16 * GIB), MAX_POINTS)
    x = drawn["layout"]["meta"]["x"]
    assert len(x) <= MAX_POINTS + 2 * len(rank.phases_at)
    assert all(a < b for a, b in pairwise(x)), "plotly stacks points of one place"
    *stack, together = drawn["data"]
    assert max(together["y"]) == pytest.approx(rank.peak / GIB, abs=1e-3)
    assert {trace["name"]: trace["fillcolor"] for trace in stack}.items() <= COLOURS.items()
    assert [trace["name"] for trace in stack] == [kind for kind in COLOURS if kind in {t["name"] for t in stack}]
    for number, total in enumerate(together["y"]):
        assert sum(trace["y"][number] or 0.0 for trace in stack) == pytest.approx(total, abs=0.01)
    heights = [shape["y0"] for shape in drawn["layout"]["shapes"]]
    assert heights == pytest.approx([79.16, 79.16 - 5.3984], abs=1e-3)  # the device, and less the margin


def test_the_script_finds_where_phases_begin():
    """A point at a border belongs to the phase that begins there."""
    rank = rank_of(0, 0, points=4)
    meta = memory_curve(rank, 0, MAX_POINTS)["layout"]["meta"]
    assert meta["borders"][0][1:] == [0, "between phases", "start", True]
    assert meta["borders"][4][1:] == [16, "rollout", "step 1", True]
    assert meta["borders"][5][1:] == [20, "reward", "step 1", False]
    names = [meta["names"][place] for place in meta["places"]]
    assert names[15:21] == ["certificate", *["step 1, rollout"] * 4, "step 1, reward"]


def test_every_kind_of_memory_has_a_colour_of_its_own():
    kinds = {kind for _, _, kind in KINDS} | {OTHERS, "buffers", "kernels' work space"}
    assert kinds <= set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert colours_of(["novel", "parameters"]) == {"parameters": COLOURS["parameters"], "novel": UNKNOWN[0]}


def test_plotly_accepts_every_figure(page):
    """graph_objects checks every property's name and value."""
    figures = figures_of(page)
    assert len(figures) == 9  # a curve for each of 8 ranks, and the bars of time
    assert all(len(go.Figure(each).data) >= 2 for each in figures)


def test_many_ranks_make_no_larger_page():
    plain = a_result(points=1)
    ranks = [rank_of(number, number % 8, points=150) for number in range(24)]
    page = render(replace(plain, ranks=ranks, tightest=3))
    assert len(page.encode()) < 8_000_000
    assert len(re.findall('class="chart curve"', page)) == MAX_RANKS
    assert "4 other ranks" in page
    assert 'data-rank="3">' in page  # the tightest is shown first
    assert re.search(r'data-rank="0" hidden', page)


@pytest.mark.parametrize(("name", "kind"), [("rehearsal.html", "page"), ("rehearsal.json", "file")])
def test_only_what_is_ours_is_replaced(name, kind, tmp_path):
    (tmp_path / name).write_text("mine")
    with refuses(name, kind, "megarlhf rehearse", "nothing is replaced", "-o"):
        write(a_result(points=1), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_an_earlier_answer_is_replaced(tmp_path):
    result = a_result(points=1)
    for command in ("sft", "rl"):
        file, page = write(replace(result, command=command), tmp_path / "deep")
    assert not missing_names(re.search(r"<h1>(.*)</h1>", page.read_text()).group(1), "rl", "64 ranks")
    written = json.loads(file.read_text())
    assert (written["format"], written["command"], written["free"]) == (1, "rl", result.free)
    assert written["ranks"][0]["peak_at"] == [2, "reshard"]
    assert sorted(path.name for path in page.parent.iterdir()) == ["rehearsal.html", "rehearsal.json"]


def test_a_number_that_json_has_not_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write(replace(a_result(points=1), tool_gib=float("nan")), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (999, "999 B"), (120_000, "120 kB"), (2.16e12, "2.16 TB"), (16_737_000_000, "16.74 GB")],
)
def test_sizes_have_a_unit(nbytes, words):
    assert size(nbytes) == words
