"""What a head in fp32 does to the gap between rollout and trainer in bf16, on a CPU.

    python -m benchmarks.head_dtype [--model DIRECTORY --prompts FILE] [--out FILE]

vLLM draws responses with a bf16 model, once with its head in the model's dtype, as vLLM would by itself, and once in
fp32, as megarlhf asks for; the trainer's log-probs of the same tokens are compared with vLLM's. The two runs draw from
distributions that differ by rounding, so their tokens differ. Without --model a random Llama is made whose logits are
large (its last norm is multiplied by 5): bf16 numbers between 16 and 32 are 1/8 apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.machine import machine
from benchmarks.sampling import sample

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "head_dtype.json"
HEADS = ("bf16", "fp32")


def write_random_llama(directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tools.demo.make_data import base_files

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        head_dim=32,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.mul_(5)
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "tokenizer.model").write_bytes(base_files()["tokenizer.model"])


def gap_with_head(head: str, model: Path, prompts: Path) -> dict[str, Any]:
    """Draw 128 responses and compare; in a process of its own, since vLLM keeps state in one."""
    import vllm

    from megarlhf.config import RLConfig
    from megarlhf.observe.watch.phases import Phases
    from megarlhf.runtime import RankInfo, initialize
    from megarlhf.trainers.experience.prompts import load_prompts
    from megarlhf.trainers.rl.build import build
    from megarlhf.trainers.rl.logprob_gap import logprob_gap
    from megarlhf.trainers.rl.rollout import complete
    from megarlhf.trainers.rl.scoring import score
    from megarlhf.trainers.run.session import Session

    role = {"model": {"path": str(model), "dtype": "bf16"}}
    cfg = RLConfig.model_validate(
        {
            "run": {"dir": str(model.parent / "run")},
            "actor": role,
            "reference": role,
            "data": {"train": str(prompts), "max_prompt_tokens": 16},
            "rewards": [{"kind": "rule", "rule": "exact_match"}],
            "algo": {"advantage": "leave_one_out"},
            "train": {"num_steps": 1, "prompts_per_step": 32, "mini_batch_samples": 128, "micro_batch_samples": 32},
            "rollout": {"num_samples_per_prompt": 4, "max_response_tokens": 32},
        }
    )
    llm = vllm.LLM

    def by_itself(*arguments: Any, **options: Any) -> Any:
        assert options.pop("hf_overrides") == {"head_dtype": "float32"}
        return llm(*arguments, **options)

    runtime, data = initialize(RankInfo(), seed=0), load_prompts(cfg.data, model)
    with mock.patch.object(vllm, "LLM", by_itself if head == "bf16" else llm):
        run = build(cfg, runtime, data, Phases())
    run.engine.update_weights(run.actor.shard, version=0)
    run.engine.verify_weights(run.actor.shard)
    chosen = data.train[:32]
    experience = sample(cfg, run.engine, chosen, run.sampling, 0)
    session = Session(runtime, cfg.run.dir)
    experience, *_ = score(run, session, complete(run, session, chosen, experience, 0), 0)
    gap = {name.removeprefix("rollout_logprob_gap_"): value for name, value in logprob_gap(experience).items()}
    run.engine.close()
    return {"head": head, "tokens": experience.columns["old_logprobs"].values_T.numel(), **gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--head", choices=HEADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.head:
        print(json.dumps(gap_with_head(options.head, options.model, options.prompts)))
        return
    with tempfile.TemporaryDirectory() as directory:
        model, prompts = options.model, options.prompts
        if model is None:
            model, prompts = Path(directory) / "model", Path(directory) / "prompts.jsonl"
            write_random_llama(model)
            rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10))
            prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        gaps = []
        for head in HEADS:
            command = [sys.executable, "-m", "benchmarks.head_dtype", "--head", head]
            done = subprocess.run(
                [*command, "--model", str(model), "--prompts", str(prompts)], cwd=ROOT, capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            gaps.append(json.loads(done.stdout.splitlines()[-1]))
            print(gaps[-1], flush=True)
    name = "random Llama" if options.model is None else str(options.model)
    result = {**machine("python -m benchmarks.head_dtype"), "model": name, "gaps": gaps}
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
