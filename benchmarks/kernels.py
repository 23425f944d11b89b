"""Log-prob kernels on the CPU: ours against naive torch, token-chunked torch and the bare matrix product.

T response tokens, hidden size H = 512, vocabulary V, fp32, from hidden states and the vocabulary matrix to the
log-probability of each token and the entropy of each row:

  ours           megarlhf.kernels.linear_token_logprobs with nothing kept (save_bytes=0)
  fifth, kept    the same with a fifth, or all, of the logits kept from the forward to the backward
  naive          all logits, log_softmax, gather, entropy
  token_chunks   the same for 256 tokens at a time, made again in the backward (torch.utils.checkpoint)
  matmul         the bare product into memory that is there: the floor of a forward

Forward: without gradients. Forward and backward: a gradient for each token's log-prob, as PPO has it, into hidden
states and matrix; the entropy is a figure to look at and has no gradient. All ways run in one process, in turn,
to and fro. Memory is measured in a process of its own for each way: the peak of anonymous memory above inputs and
outputs. Every way's results are compared with fp64 on some rows first.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.machine import OVER, ROOT, machine
from benchmarks.peers import AnonymousPeak
from megarlhf.kernels import linear_token_logprobs

RESULT = ROOT / "benchmarks" / "results" / "kernels.json"
HIDDEN = 512
SHAPES = tuple((tokens, vocab) for vocab in (32000, 128256) for tokens in (512, 1024, 2048))
TOKEN_CHUNK = 256
Way = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def naive(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    log_TV = torch.log_softmax(hidden_TH @ weight_VH.t(), -1)
    with torch.no_grad():
        entropy_T = -(log_TV.exp() * log_TV).sum(-1)
    return log_TV.gather(1, labels_T[:, None])[:, 0], entropy_T


def token_chunks(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    parts = []
    for start in range(0, len(labels_T), TOKEN_CHUNK):
        part = (hidden_TH[start : start + TOKEN_CHUNK], weight_VH, labels_T[start : start + TOKEN_CHUNK])
        parts.append(checkpoint(naive, *part, use_reentrant=False) if hidden_TH.requires_grad else naive(*part))
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def ours(share: float) -> Way:
    """With room for this share of the logits."""
    return lambda hidden_TH, weight_VH, labels_T: linear_token_logprobs(
        hidden_TH, weight_VH, labels_T, save_bytes=math.ceil(share * 4 * len(labels_T) * len(weight_VH))
    )


WAYS: Mapping[str, Way] = {
    "ours": ours(0.0),
    "fifth": ours(0.2),
    "kept": ours(1.0),
    "naive": naive,
    "token_chunks": token_chunks,
}


class Task:
    """Inputs of one shape, and what is timed."""

    def __init__(self, tokens: int, vocab: int, hidden: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden_TH = torch.randn(tokens, hidden, generator=generator)
        self.weight_VH = torch.randn(vocab, hidden, generator=generator).mul_(2 * hidden**-0.5)
        self.labels_T = torch.randint(0, vocab, (tokens,), generator=generator)
        self.by_logprob_T = torch.randn(tokens, generator=generator)

    def forward(self, way: Way) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return way(self.hidden_TH, self.weight_VH, self.labels_T)

    def forward_backward(self, way: Way) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in (self.hidden_TH, self.weight_VH)]
        logprobs_T, entropy_T = way(leaves[0], leaves[1], self.labels_T)
        grads = torch.autograd.grad(logprobs_T, leaves, self.by_logprob_T)
        return (logprobs_T.detach(), entropy_T.detach(), *grads)

    def check(self) -> None:
        """Every way against fp64 on the first rows, gradients of the hidden states included."""
        rows = slice(0, 16)
        hidden_TH = self.hidden_TH[rows].double().requires_grad_()
        wanted = list(naive(hidden_TH, self.weight_VH.double(), self.labels_T[rows]))
        wanted.append(torch.autograd.grad(wanted[0], hidden_TH, self.by_logprob_T[rows].double())[0])
        for name, way in WAYS.items():
            outputs = self.forward_backward(way)
            for got, want in zip(outputs, wanted, strict=False):
                off = float((got[rows].double() - want.detach()).abs().max())
                if not off < 1e-4:
                    raise AssertionError(f"{name} is off by {off:.3g} against fp64")


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def seconds(task: Task, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Pass -> way -> seconds of each round, after one that is not counted."""
    logits_TV = torch.empty(len(task.labels_T), len(task.weight_VH))
    forward: dict[str, Callable[[], object]] = {
        "matmul": lambda: torch.mm(task.hidden_TH, task.weight_VH.t(), out=logits_TV)
    }
    # Without gradients nothing is kept.
    forward |= {
        name: (lambda way=way: task.forward(way)) for name, way in WAYS.items() if name not in ("fifth", "kept")
    }
    both = {name: (lambda way=way: task.forward_backward(way)) for name, way in WAYS.items()}
    taken = {}
    for label, ways in (("forward", forward), ("forward_backward", both)):
        orders = [list(ways), list(reversed(ways))]
        taken[label] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name in orders[number % 2]:
                taken[label][name].append(timed(ways[name]))
        taken[label] = {name: values[1:] for name, values in taken[label].items()}
    return taken


def peak_of(tokens: int, vocab: int, hidden: int, label: str, name: str) -> int:
    """Bytes above inputs and outputs at the peak, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.kernels", "--peak", str(tokens), str(vocab), str(hidden), label, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {name} failed:\n{done.stderr}")
    return int(done.stdout.split()[-1])


def print_peak(tokens: int, vocab: int, hidden: int, label: str, name: str) -> None:
    small = Task(8, 2048, hidden)
    getattr(small, label)(WAYS[name])
    task = Task(tokens, vocab, hidden)
    with AnonymousPeak() as peak:
        outputs = getattr(task, label)(WAYS[name])
    print(max(peak.peak_bytes - sum(tensor.nbytes for tensor in outputs), 1))


def summary(taken: dict[str, dict[str, list[float]]], peaks: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Of one shape."""
    spread = {
        label: {
            name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for name, values in ways.items()
        }
        for label, ways in taken.items()
    }
    forward, both = ({name: quantiles["median"] for name, quantiles in ways.items()} for ways in spread.values())
    return {
        "linear_forward_over_matmul": forward["ours"] / forward["matmul"],
        "naive_over_ours": forward["naive"] / forward["ours"],
        "naive_memory_over_ours": peaks["forward"]["naive"] / peaks["forward"]["ours"],
        "token_chunks_over_ours": forward["token_chunks"] / forward["ours"],
        "forward_backward": {
            "naive_over_ours": both["naive"] / both["ours"],
            "naive_over_fifth": both["naive"] / both["fifth"],
            "naive_over_kept": both["naive"] / both["kept"],
            "token_chunks_over_ours": both["token_chunks"] / both["ours"],
            "naive_memory_over_ours": peaks["forward_backward"]["naive"] / peaks["forward_backward"]["ours"],
            "naive_memory_over_fifth": peaks["forward_backward"]["naive"] / peaks["forward_backward"]["fifth"],
        },
        "seconds": spread,
        "peak_bytes": peaks,
    }


def rounded(ratios: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="default: torch's own choice")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--peak", nargs=5, metavar=("T", "V", "H", "PASS", "WAY"), help="print one peak of memory")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.peak:
        *sizes, label, name = arguments.peak
        print_peak(*(int(size) for size in sizes), label, name)
        return
    shapes = {}
    for tokens, vocab in SHAPES:
        task = Task(tokens, vocab, HIDDEN)
        task.check()
        taken = seconds(task, arguments.rounds)
        peaks = {
            label: {name: peak_of(tokens, vocab, HIDDEN, label, name) for name in ways if name in WAYS}
            for label, ways in taken.items()
        }
        shape = shapes[f"T{tokens}_H{HIDDEN}_V{vocab}"] = summary(taken, peaks)
        print(
            tokens,
            vocab,
            rounded({key: shape[key] for key in list(shape)[:4]}),
            rounded(shape["forward_backward"]),
            flush=True,
        )
    result = {
        "linear_forward_over_matmul": max(shape["linear_forward_over_matmul"] for shape in shapes.values()),
        "naive_over_ours": min(shape["naive_over_ours"] for shape in shapes.values()),
        "naive_memory_over_ours": min(shape["naive_memory_over_ours"] for shape in shapes.values()),
        "shapes": shapes,
        "rounds": arguments.rounds,
        "threads": torch.get_num_threads(),
        "direction": OVER,
        "machine": machine("make bench-kernels"),
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
