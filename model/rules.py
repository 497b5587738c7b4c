"""The rules between a model's sizes. Each broken one becomes a line that names the fix."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.config import ModelConfig

POSITIVE = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim "
    "q_lora_rank o_groups o_lora_rank moe_intermediate_size n_routed_experts num_experts_per_tok "
    "sliding_window index_n_heads index_head_dim index_topk candidate_topk_blocks "
    "candidate_block_size hc_mult hc_sinkhorn_iters max_position_embeddings workspace_mb "
    "rope_theta compress_rope_theta routed_scaling_factor swiglu_limit rms_norm_eps hc_eps"
).split()
ENGRAM_POSITIVE = "engram_vocab_size engram_n_heads engram_head_dim".split()


class BrokenRules(ValueError):
    """A model whose sizes do not fit together; `problems` holds one message a broken rule."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("the model's sizes do not fit together:\n  " + "\n  ".join(problems))
        self.problems = problems


def broken_rules(c: ModelConfig) -> list[str]:
    """All rules that `c` breaks, as messages for a person; empty when it is sound."""
    positive = POSITIVE + (ENGRAM_POSITIVE if c.engram_layer_ids else [])
    small = [f"{n}={getattr(c, n)} must be positive" for n in positive if getattr(c, n) <= 0]
    if small:  # the rules below divide by these
        return small
    return [*_attention(c), *_schedule(c), *_experts(c), *_engram(c), *_tokens(c), *_vision(c)]


def _attention(c: ModelConfig) -> list[str]:
    out = []
    if c.num_key_value_heads != 1:
        out.append(f"num_key_value_heads={c.num_key_value_heads}: V4.1 shares one KV head; set 1")
    if c.num_attention_heads % c.o_groups:
        out.append(
            f"num_attention_heads={c.num_attention_heads} is not divisible by o_groups={c.o_groups}"
        )
    rope = c.qk_rope_head_dim
    if rope % 2:
        out.append(f"qk_rope_head_dim={rope} must be even: channels are rotated in pairs")
    if rope > c.head_dim:
        out.append(f"qk_rope_head_dim={rope} exceeds head_dim={c.head_dim}")
    if rope > c.index_head_dim:
        out.append(f"qk_rope_head_dim={rope} exceeds index_head_dim={c.index_head_dim}")
    for name in ("head_dim", "index_head_dim"):
        if getattr(c, name) % 32:
            out.append(f"{name}={getattr(c, name)} must be a multiple of 32, the quantisers' group")
    y = c.rope_scaling
    if y.factor < 1 or y.original_max_position_embeddings <= 0 or not y.beta_fast > y.beta_slow > 0:
        out.append(
            "rope_scaling needs factor >= 1, original_max_position_embeddings > 0 and "
            f"beta_fast > beta_slow > 0; found {y}"
        )
    return out


def _schedule(c: ModelConfig) -> list[str]:
    out = []
    ratios, layers = c.compress_ratios, c.num_hidden_layers
    if len(ratios) < layers:
        return [f"compress_ratios has {len(ratios)} entries for num_hidden_layers={layers}"]
    if any(r < 0 for r in ratios):
        out.append(f"compress_ratios={list(ratios)} may hold no negative ratio")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(c, name)
        if any(a >= b for a, b in pairwise(ids)) or any(i < 0 for i in ids):
            out.append(f"{name}={list(ids)} must be strictly increasing layer numbers")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for n in getattr(c, name):
            if n < len(ratios) and ratios[n] == 0:
                out.append(f"layer {n} of {name} has compress ratio 0; a source needs a ratio > 0")
            if n >= len(ratios):
                out.append(f"layer {n} of {name} lies past the {len(ratios)} compress_ratios")
    if missing := [n for n in c.kv_source_layer_ids if n not in c.index_source_layer_ids]:
        out.append(f"KV sources {missing} are missing from index_source_layer_ids")
    for n in range(layers):
        if ratios[n] <= 0:
            continue
        before = [s for s in c.kv_source_layer_ids if s <= n]
        if not before:
            out.append(f"layer {n} (ratio {ratios[n]}) has no KV source at or before it")
        elif before[-1] < len(ratios) and ratios[before[-1]] != ratios[n]:
            out.append(
                f"layer {n} has ratio {ratios[n]} but its KV source, layer {before[-1]}, "
                f"has ratio {ratios[before[-1]]}"
            )
    source = c.candidate_source_layer_id
    if source is not None:
        if source not in c.index_source_layer_ids:
            out.append(
                f"candidate_source_layer_id={source} is not among index_source_layer_ids="
                f"{list(c.index_source_layer_ids)}"
            )
        elif moved := [n for n in c.kv_source_layer_ids if n > source]:
            out.append(
                f"KV sources {moved} come after candidate_source_layer_id={source}: its candidates "
                "would point into other entries"
            )
        if c.candidate_topk_blocks * c.candidate_block_size < c.index_topk:
            pool = c.candidate_topk_blocks * c.candidate_block_size
            out.append(
                f"candidate_topk_blocks * candidate_block_size = {pool} is below "
                f"index_topk={c.index_topk}"
            )
    return out


def _experts(c: ModelConfig) -> list[str]:
    out = []
    if c.num_experts_per_tok > c.n_routed_experts:
        out.append(
            f"num_experts_per_tok={c.num_experts_per_tok} exceeds "
            f"n_routed_experts={c.n_routed_experts}"
        )
    if c.n_shared_experts != 1:
        out.append(f"n_shared_experts={c.n_shared_experts}: V4.1 has exactly one; set 1")
    if not c.norm_topk_prob:
        out.append("norm_topk_prob=false: V4.1 normalises the chosen scores; set true")
    return out


def _engram(c: ModelConfig) -> list[str]:
    out = []
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        out.append(
            f"engram_num_embeddings has {len(c.engram_num_embeddings)} row counts for "
            f"{len(c.engram_layer_ids)} engram_layer_ids; give one for each"
        )
    if c.engram.store not in ("device", "host", "mapped"):
        out.append(f"engram.store={c.engram.store} is unknown; use device, host or mapped")
    elif c.engram.store == "mapped" and not c.engram.path:
        out.append(
            "engram.store=mapped needs engram.path: a folder of safetensors, or a .gguf file"
        )
    elif c.engram.store == "mapped" and not c.engram_layers:
        out.append("engram.store=mapped, but this model has no Engram layer; use store=device")
    elif c.engram.store != "mapped" and c.engram.path:
        out.append(
            f"engram.path={c.engram.path} is not read by engram.store={c.engram.store}; set "
            "engram.store=mapped, or drop the path"
        )
    if not c.engram_layer_ids:
        return out
    if c.engram_max_ngram_size < 2:
        out.append(f"engram_max_ngram_size={c.engram_max_ngram_size} must be at least 2")
    if c.engram_compressed_vocab_size <= 0 or c.engram_compressed_vocab_size > c.vocab_size:
        out.append(
            f"engram_compressed_vocab_size={c.engram_compressed_vocab_size} must lie in "
            f"1..vocab_size={c.vocab_size}"
        )
    return out


def _tokens(c: ModelConfig) -> list[str]:
    names = ["bos_token_id", "eos_token_id", "pad_token_id"]
    if c.engram_layer_ids:
        names.append("engram_pad_token_id")
    if c.vision.num_hidden_layers:
        names.append("image_token_id")
    return [
        f"{n}={getattr(c, n)} lies outside the vocabulary of {c.vocab_size}"
        for n in names
        if not 0 <= getattr(c, n) < c.vocab_size
    ]


def _vision(c: ModelConfig) -> list[str]:
    v = c.vision
    if v.num_hidden_layers == 0:
        return []
    out = []
    if v.num_hidden_layers < 0:
        out.append(f"vision.num_hidden_layers={v.num_hidden_layers} must be 0 (no tower) or more")
    if v.num_attention_heads <= 0 or v.hidden_size % v.num_attention_heads:
        out.append(
            f"vision.hidden_size={v.hidden_size} is not divisible by "
            f"vision.num_attention_heads={v.num_attention_heads}"
        )
    elif (v.hidden_size // v.num_attention_heads) % 4:
        out.append("vision head width must be a multiple of 4 for the two-dimensional rotation")
    for name in ("patch_size", "downsample_ratio", "min_pixels", "intermediate_size"):
        if getattr(v, name) <= 0:
            out.append(f"vision.{name}={getattr(v, name)} must be positive")
    if v.max_image_tokens < 4:
        out.append(
            f"vision.max_image_tokens={v.max_image_tokens} holds no image cell; set 4 or more"
        )
    if v.max_wh_ratio is not None and v.max_wh_ratio <= 0:
        out.append(f"vision.max_wh_ratio={v.max_wh_ratio} must be positive or null")
    return out
