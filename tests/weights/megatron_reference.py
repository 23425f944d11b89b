"""What Megatron-Core holds of a model, by plain torch: the reference that the tables are compared with. Only values of
logical tensors are used, sliced, transposed and concatenated whole, then chunked over ranks."""

from __future__ import annotations

import torch

from megarlhf.architectures.architecture import Architecture

Tensors = dict[str, torch.Tensor]


def attention(arch: Architecture, logical: Tensors, layer: int) -> tuple[Tensors, Tensors, Tensors]:
    """(q, k and v as matrices [out, in] and biases [out], by `q.weight`), (output), of a layer."""
    if arch.model_type == "gpt2":
        p = f"transformer.h.{layer}.attn."
        weight, bias = logical[p + "c_attn.weight"].T, logical[p + "c_attn.bias"]
        qkv = {}
        for n, kind in enumerate("qkv"):
            qkv[f"{kind}.weight"] = weight[n * 64 : n * 64 + 64]
            qkv[f"{kind}.bias"] = bias[n * 64 : n * 64 + 64]
        return qkv, {"weight": logical[p + "c_proj.weight"].T, "bias": logical[p + "c_proj.bias"]}, {}
    if arch.model_type == "phi3":
        p = f"model.layers.{layer}.self_attn."
        sizes = [heads * arch.head_dim for heads in (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)]
        parts = logical[p + "qkv_proj.weight"].split(sizes)
        qkv = {f"{kind}.weight": part for kind, part in zip("qkv", parts, strict=True)}
        return qkv, {"weight": logical[p + "o_proj.weight"]}, {}
    p = f"model.{'decoder.' if arch.model_type == 'opt' else ''}layers.{layer}.self_attn."
    out = "out_proj" if arch.model_type == "opt" else "o_proj"
    qkv = {
        f"{k}.{w}": logical[f"{p}{k}_proj.{w}"] for k in "qkv" for w in ("weight", "bias") if w in _of(logical, p, k)
    }
    output = {w: logical[f"{p}{out}.{w}"] for w in ("weight", "bias") if f"{p}{out}.{w}" in logical}
    norms = {f"{k}_layernorm.weight": logical[f"{p}{k}_norm.weight"] for k in "qk" if arch.qk_norm}
    return qkv, output, norms


def _of(logical: Tensors, prefix: str, kind: str) -> set[str]:
    return {w for w in ("weight", "bias") if f"{prefix}{kind}_proj.{w}" in logical}


def mlp(arch: Architecture, logical: Tensors, layer: int) -> tuple[list[Tensors], list[Tensors]]:
    """Per expert (one, if dense): what stands in fc1, each to be split by rows, and fc2; weights [out, in]."""
    kinds = ("weight", "bias")
    if arch.model_type == "gpt2":
        p = f"transformer.h.{layer}.mlp."
        first = {"up.weight": logical[p + "c_fc.weight"].T, "up.bias": logical[p + "c_fc.bias"]}
        return [first], [{"weight": logical[p + "c_proj.weight"].T, "bias": logical[p + "c_proj.bias"]}]
    if arch.model_type == "opt":
        p = f"model.decoder.layers.{layer}."
        return [{f"up.{w}": logical[f"{p}fc1.{w}"] for w in kinds}], [{w: logical[f"{p}fc2.{w}"] for w in kinds}]
    p = f"model.layers.{layer}."
    if arch.model_type == "phi3":
        gate, up = logical[p + "mlp.gate_up_proj.weight"].chunk(2)
        return [{"gate.weight": gate, "up.weight": up}], [{"weight": logical[p + "mlp.down_proj.weight"]}]
    blocks, names = [f"{p}mlp."], ("gate_proj", "up_proj", "down_proj")
    if arch.model_type == "mixtral":
        blocks = [f"{p}block_sparse_moe.experts.{j}." for j in range(arch.num_experts)]
        names = ("w1", "w3", "w2")
    elif arch.num_experts:
        blocks = [f"{p}mlp.experts.{j}." for j in range(arch.num_experts)]
    gate, up, down = names
    first, second = [], []
    for b in blocks:
        here = [w for w in kinds if f"{b}{down}.{w}" in logical]
        first.append({f"{k}.{w}": logical[f"{b}{n}.{w}"] for w in here for k, n in (("gate", gate), ("up", up))})
        second.append({w: logical[f"{b}{down}.{w}"] for w in here})
    return first, second


def megatron_qkv(arch: Architecture, qkv: Tensors, kind: str) -> torch.Tensor:
    """[q heads of group 0, k0, v0, q heads of group 1, ...], whole."""
    groups = arch.num_kv_heads
    q, k, v = (qkv[f"{x}.{kind}"].unflatten(0, (groups, -1)) for x in "qkv")
    return torch.cat([q, k, v], dim=1).flatten(0, 1)


def fc1(arch: Architecture, first: Tensors, kind: str, tp: int, tp_rank: int) -> torch.Tensor:
    """[gate_r; up_r] of one rank."""
    return torch.cat([first[f"{x}.{kind}"].chunk(tp)[tp_rank] for x in ("gate", "up") if f"{x}.{kind}" in first])


NORMS = {
    "gpt2": ("transformer.h.{}.ln_1", "transformer.h.{}.ln_2", "transformer.ln_f"),
    "opt": ("model.decoder.layers.{}.self_attn_layer_norm", "model.decoder.layers.{}.final_layer_norm",
     "model.decoder.final_layer_norm"),
}  # fmt: skip
LLAMA_NORMS = ("model.layers.{}.input_layernorm", "model.layers.{}.post_attention_layernorm", "model.norm")
EMBEDDINGS = {
    "gpt2": ("transformer.wte.weight", "transformer.wpe.weight"),
    "opt": ("model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"),
}


def megatron_layer(
    arch: Architecture, logical: Tensors, layer: int, *, tp: int, tp_rank: int, ep: int = 1, ep_rank: int = 0,
    spec: str = "local", experts: str = "each"
) -> Tensors:  # fmt: skip
    te = spec == "te"
    qkv, output, out = attention(arch, logical, layer)
    out = {"self_attention." + name: value for name, value in out.items()}
    for kind in ("weight", "bias"):
        if f"q.{kind}" in qkv:
            out[f"self_attention.linear_qkv.{kind}"] = megatron_qkv(arch, qkv, kind).chunk(tp)[tp_rank]
    out["self_attention.linear_proj.weight"] = output["weight"].chunk(tp, dim=1)[tp_rank]
    if "bias" in output:
        out["self_attention.linear_proj.bias"] = output["bias"]
    before, between, _ = NORMS.get(arch.model_type, LLAMA_NORMS)
    for kind in ("weight", "bias") if arch.norm == "layer" else ("weight",):
        name = f"self_attention.linear_qkv.layer_norm_{kind}" if te else f"input_layernorm.{kind}"
        out[name] = logical[f"{before.format(layer)}.{kind}"]
        fused = te and not arch.num_experts
        name = f"mlp.linear_fc1.layer_norm_{kind}" if fused else f"pre_mlp_layernorm.{kind}"
        out[name] = logical[f"{between.format(layer)}.{kind}"]
    first, second = mlp(arch, logical, layer)
    if not arch.num_experts:
        for kind in ("weight", "bias") if arch.mlp_bias else ("weight",):
            out[f"mlp.linear_fc1.{kind}"] = fc1(arch, first[0], kind, tp, tp_rank)
        out["mlp.linear_fc2.weight"] = second[0]["weight"].chunk(tp, dim=1)[tp_rank]
        if arch.mlp_bias:
            out["mlp.linear_fc2.bias"] = second[0]["bias"]
        return out
    block = "block_sparse_moe" if arch.model_type == "mixtral" else "mlp"
    out["mlp.router.weight"] = logical[f"model.layers.{layer}.{block}.gate.weight"]
    per_rank = arch.num_experts // ep
    mine = range(ep_rank * per_rank, (ep_rank + 1) * per_rank)
    fc1_weights = [fc1(arch, first[j], "weight", tp, tp_rank) for j in mine]
    fc2_weights = [second[j]["weight"].chunk(tp, dim=1)[tp_rank] for j in mine]
    if experts == "each":
        names = [f"mlp.experts.local_experts.{n}.linear_fc{{}}.weight" for n in range(per_rank)]
    else:
        names = [f"mlp.experts.linear_fc{{}}.weight{n}" for n in range(per_rank)]
    if experts == "grouped" and not te:
        # GroupedMLP's forward: w1 = weight1.view(E, hidden, -1), w2 = weight2.view(E, -1, hidden), x @ w1, y @ w2.
        out["mlp.experts.weight1"] = torch.stack([w.T for w in fc1_weights]).reshape(arch.hidden_size, -1)
        out["mlp.experts.weight2"] = torch.stack([w.T for w in fc2_weights]).reshape(-1, arch.hidden_size)
    else:
        for name, fc1_weight, fc2_weight in zip(names, fc1_weights, fc2_weights, strict=True):
            out[name.format(1)], out[name.format(2)] = fc1_weight, fc2_weight
    return out
