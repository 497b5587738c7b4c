"""What a DeepSeek-V4.1 model is: the fields of the released config.json and their meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["window", "source", "reindex", "reuse"]
Recompute = Literal["none", "full", "selective"]


@dataclass(frozen=True)
class RopeScaling:
    """YaRN of the compressed layers (ratio > 0); ratio-0 layers use plain RoPE."""

    rope_type: Literal["yarn"] = "yarn"
    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclass(frozen=True)
class VisionConfig:
    """The image tower. `num_hidden_layers: 0` builds none."""

    num_hidden_layers: int = 0
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class QatConfig:
    """The three cache quantisers, part of the model: forward rounds, backward passes through.

    The published pre-training ran without `main_fp4`; post-training added it.
    """

    window_fp8: bool = True
    main_fp4: bool = True
    index_fp4: bool = True


@dataclass(frozen=True)
class CompileConfig:
    """Which functions go through torch.compile: the Engram gate, reading and writing the residual
    streams, and the norms. They compute the same to rounding; where a compiler is missing or fails,
    the run says so and goes on without it."""

    engram_gate: bool = False
    hyper_connection: bool = False
    norm: bool = False


@dataclass(frozen=True)
class EngramStoreConfig:
    """Where the Engram tables live.

    device: beside the model, learning with it. host: in the host's pinned memory, learning, for
    tables larger than an accelerator; on a CPU the same as device. mapped: rows read by id out of
    the files at `path` (a folder of safetensors, or a .gguf file), frozen.
    """

    store: Literal["device", "host", "mapped"] = "device"
    path: str = ""


@dataclass(frozen=True)
class ModelConfig:
    """One DeepSeek-V4.1 model, text and vision, under the released field names.

    `num_hidden_layers` may be smaller than the schedules cover: the first layers keep their roles
    and sources past the end are ignored. `qat`, `engram`, `compile`, `weights` and `workspace_mb`
    say how we run it; they are not part of config.json. `carried` holds released entries that do
    not shape the backbone (the draft heads' settings, library metadata) as (dotted path, JSON
    text), so that a file comes back whole.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    num_key_value_heads: int = 1
    n_shared_experts: int = 1
    scoring_func: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 0
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 129264
    dtype: Literal["float32", "bfloat16"] = "float32"
    vision: VisionConfig = field(default_factory=VisionConfig)
    qat: QatConfig = field(default_factory=QatConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    engram: EngramStoreConfig = field(default_factory=EngramStoreConfig)
    weights: str = ""  # a folder of released safetensors to start from; "" = from scratch
    workspace_mb: int = 48
    carried: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        from model.rules import BrokenRules

        if found := self.problems():
            raise BrokenRules(found)

    @classmethod
    def from_released(cls, document: dict) -> ModelConfig:
        """Read a released config.json (already parsed). ValueError lists every bad entry."""
        from model.released_config import read_released

        return cls(**read_released(document))

    def to_released(self) -> dict:
        """The nested config.json of this model; `from_released` gives an equal architecture."""
        from model.released_config import write_released

        return write_released(self)

    def problems(self) -> list[str]:
        """Every rule this configuration breaks, each with what would satisfy it."""
        from model.rules import broken_rules

        return broken_rules(self)

    # Roles

    def ratio(self, layer: int) -> int:
        return self.compress_ratios[layer]

    def role(self, layer: int) -> Role:
        """Window only; KV source (compressor and indexer with keys); reindex; or reuse."""
        if self.ratio(layer) == 0:
            return "window"
        if layer in self.kv_source_layer_ids:
            return "source"
        return "reindex" if layer in self.index_source_layer_ids else "reuse"

    def selects(self, layer: int) -> bool:
        """True for index sources: they have an indexer and publish a selection of their own."""
        return self.role(layer) in ("source", "reindex")

    def uses_candidates(self, layer: int) -> bool:
        """True for index sources after the candidate source: they score the candidates alone."""
        source = self.candidate_source_layer_id
        return source is not None and layer > source and layer in self.index_source_layer_ids

    @property
    def active_ratios(self) -> tuple[int, ...]:
        """The distinct compression ratios > 0 of the layers that exist."""
        return tuple(sorted({r for r in self.compress_ratios[: self.num_hidden_layers] if r > 0}))

    @property
    def alignment(self) -> int:
        """Documents start at multiples of this inside a row, so that no group straddles two."""
        return math.lcm(1, *self.active_ratios)

    # Engram

    @property
    def engram_layers(self) -> tuple[int, ...]:
        """Engram layers that exist in this model."""
        return tuple(n for n in self.engram_layer_ids if n < self.num_hidden_layers)

    @property
    def engram_columns(self) -> int:
        """Table rows read per token and Engram layer: one per n-gram size and hash head."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads
