"""A module of a user's that is a command line too, and takes the run's arguments for its own when it is imported."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--threshold", type=float, required=True)
parser.parse_args(["--help"])


def score(prompt: str, response: str, fields: dict[str, object]) -> float:
    return 1.0
