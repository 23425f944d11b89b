"""What is said of a reward model's scores, by hand."""

import math

import pytest
import torch

from megarlhf.algo.calibration import calibration_error, correlation, pair_report, reliability, wilson_interval


def test_the_interval_of_a_share():
    """Of 8 of 10, by Wilson's formula."""
    z2 = 1.959963984540054**2
    middle = (0.8 + z2 / 20) / (1 + z2 / 10)
    half = math.sqrt(z2) / (1 + z2 / 10) * math.sqrt(0.016 + z2 / 400)
    assert wilson_interval(8, 10) == pytest.approx((middle - half, middle + half))
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def log_odds(p):
    return math.log(p / (1 - p))


def test_bins_of_what_the_model_says():
    """Sure to .55 twice, once right; to .95 three times, each right; a pair of equal scores is half right."""
    said = [log_odds(0.55), -log_odds(0.55), *[log_odds(0.95)] * 3, 0.0]
    table = reliability(torch.tensor(said, dtype=torch.float64), torch.zeros(6, dtype=torch.float64))
    assert [(row["from"], row["to"], row["pairs"]) for row in table] == [(0.5, 0.6, 3), (0.9, 1.0, 3)]
    assert table[0]["said"] == pytest.approx((0.55 * 2 + 0.5) / 3)
    assert table[0]["right"] == pytest.approx(0.5)
    assert (table[1]["said"], table[1]["right"]) == pytest.approx((0.95, 1.0))
    assert calibration_error(table) == pytest.approx((3 * (1.6 / 3 - 0.5) + 3 * 0.05) / 6)
    assert calibration_error([]) == 0.0


def test_correlation():
    assert correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 4, 6])) == pytest.approx(1.0)
    assert correlation(torch.tensor([1.0, 2.0]), torch.tensor([3, 3])) is None


def test_a_report():
    """Two pairs right of three; the longer response is preferred once and ranked rightly, the shorter once and not."""
    scores_P2 = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    report = pair_report(scores_P2, torch.tensor([[5, 2], [1, 4], [3, 3]]))
    assert report["accuracy"] == pytest.approx(2 / 3)
    assert report["accuracy_interval"] == pytest.approx(list(wilson_interval(2, 3)))
    assert report["chosen_longer"] == {"pairs": 1, "accuracy": 1.0}
    assert report["chosen_shorter"] == {"pairs": 1, "accuracy": 0.0}
    assert report["equal_length"] == {"pairs": 1, "accuracy": 1.0}
    assert (report["score_mean"], report["pairs"]) == (pytest.approx(5 / 6), 3)
    assert report["calibration_error"] == pytest.approx(abs(1 / (1 + math.exp(-1)) - 2 / 3))
