"""Expert iteration in a loop of your own: draw answers, keep the right ones, learn from them.

    make demo                                     # makes the default model and data, once
    .venv/bin/python examples/own_loop.py
    .venv/bin/python examples/own_loop.py --model DIR --data FILE --run-dir runs/mine rollout.engine=megatron
    .venv/bin/torchrun --nproc-per-node 2 examples/own_loop.py

FILE has lines {"prompt", "answer"}. Words at the end change keys of the configuration; actor.model.random_init=true is
for a model without weights. Started again in the same run directory, it goes on after its last step.
"""

import argparse
import itertools
import json
from pathlib import Path

import megarlhf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="runs/demo/sft/checkpoints/latest/actor")
parser.add_argument("--data", type=Path, default="runs/demo/data/prompts_train.jsonl")
parser.add_argument("--run-dir", default="runs/own_loop")
parser.add_argument("overrides", nargs="*")
options = parser.parse_args()

PROMPTS, SAMPLES = 32, 4
config = {
    "run": {"dir": options.run_dir},
    "actor": {"model": {"path": options.model}, "optim": {"lr": 3e-4}},
    "data": {"max_prompt_tokens": 16},
    "train": {
        "num_steps": 10,
        "prompts_per_step": PROMPTS,
        "mini_batch_samples": PROMPTS * SAMPLES,
        "max_tokens_per_micro_batch": 1024,
    },
    "rollout": {"num_samples_per_prompt": SAMPLES, "max_response_tokens": 6},
}
records = [json.loads(line) for line in options.data.read_text().splitlines()]

with megarlhf.Loop(config, options.overrides) as loop:
    for step in loop.steps():
        batch = [records[n % len(records)] for n in range(step * PROMPTS, (step + 1) * PROMPTS)]
        samples = loop.generate([record["prompt"] for record in batch])
        answers = itertools.chain.from_iterable([record["answer"]] * SAMPLES for record in batch)
        right = [n for n, (text, answer) in enumerate(zip(samples.texts, answers, strict=True)) if text == answer]
        chosen = samples.select(right or range(len(samples)))
        loop.train(chosen, [1.0 if right else 0.0] * len(chosen), metrics={"right": len(right)})
        loop.update_weights()
        if loop.is_main:
            print(f"step {loop.step}: {len(right)} of {len(samples)} are right")
    if loop.is_main:
        print(f"the model is in {options.run_dir}/checkpoints/latest/actor")
