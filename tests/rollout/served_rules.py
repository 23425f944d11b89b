"""A rule that tests/rollout/test_serve_reward.py serves."""


def short(prompt, response, fields):
    """1 for a response of one letter, None for others."""
    return 1.0 if len(response) == 1 else None


def picky(prompt, response, fields):
    """Fails on the response `bad`."""
    if response == "bad":
        raise RuntimeError("no judge for this")
    return 1.0


def finished_only(batch):
    """Reads a column of which a request says nothing."""
    return [float(finished) for finished in batch.finished]


def texts_of_batch(batch):
    return [float(len(response)) for response in batch.responses]


def wanted(completions, wanted, **columns):
    """TRL's form: 1 for a completion that is wanted."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(text in row) for text, row in zip(texts, wanted, strict=True)]


def of_messages(completions, **columns):
    return [float(isinstance(completion, list)) for completion in completions]
