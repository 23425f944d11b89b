"""What texts of one prompt begin with in common, in a reward model's tokens."""

import torch

from megarlhf.trainers.experience.retokenize import common_beginnings


def test_what_the_texts_of_a_prompt_begin_with_stands_for_it():
    """A text that was cut begins otherwise: its prompt is then computed for each. Equal texts are all prompt."""
    texts = [[1, 5, 6, 7], [1, 5, 6], [1, 5, 9, 9], [8, 8], [7, 6, 5], [5], [4, 4], [4, 4], [3]]
    begins, numbers = common_beginnings(
        [torch.tensor(text) for text in texts], torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 4])
    )
    assert begins == [2, 2, 2, 2, 1, 1, 2, 2, 1]
    assert numbers.tolist() == [0, 0, 0, 1, 9, 10, 3, 3, 4]
    for begin, text, number in zip(begins, texts, numbers.tolist(), strict=True):
        others = [other[:begin] for other, n in zip(texts, numbers.tolist(), strict=True) if n == number]
        assert all(other == text[:begin] for other in others)
