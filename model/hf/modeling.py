"""DeepseekV41ForCausalLM: the model under the interface that users of transformers know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.utils.generic import ModelOutput

from model.engram.hashing import HashGeometry, hash_rows
from model.engram.owners import OwnerStore
from model.engram.rows import EngramRows
from model.engram.store import RowStore
from model.engram.token_map import compress, compressed_token_map
from model.hf.configuration import DeepseekV41Config
from model.hf.documents import AlignedRows, sequence_ids
from model.hyper_connection import read
from model.init import init_weights
from model.layout import Images, ModelInputs
from model.transformer import DeepseekV41


@dataclass
class DeepseekV41Output(ModelOutput):
    """loss: fp32 scalar. logits [B, kept, V] fp32. last_hidden_state [B, S, D]: what the head
    reads. hidden_states: [B, S, D] for the embedding and after every layer, its streams mixed as
    the next sublayer reads them. What was not asked for is None; at padding all is 0."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class DeepseekV41ForCausalLM(PreTrainedModel, GenerationMixin):
    """DeepSeek-V4.1 with its Engram tables, for reading, scoring, sampling and further training.

    The tables are frozen here and no part of the parameters (the trainer learns them). Row ids are
    hashed from the tokens, for which the model needs its tokenizer: `from_pretrained` finds it
    beside the weights; after `from_config` set it with `use_tokenizer`.
    """

    config_class = DeepseekV41Config
    base_model_prefix = "model"
    main_input_name = "input_ids"

    def __init__(self, config: DeepseekV41Config, *, store: RowStore | None = None) -> None:
        super().__init__(config)
        self.architecture = config.architecture()
        self.model = DeepseekV41(self.architecture)
        self.store = store
        self.tokenizer: Any = None
        self.token_map: np.ndarray | None = None
        if self.generation_config is not None:
            self.generation_config.use_cache = False  # every step reads the whole sequence

    # Making one

    @classmethod
    def from_config(
        cls, config: DeepseekV41Config, *, seed: int = 0, **kwargs: Any
    ) -> DeepseekV41ForCausalLM:
        """A freshly initialised model, its tables included: a function of `config` and `seed`."""
        model = cls(config, store=OwnerStore(config.architecture(), seed=seed))
        init_weights(model.model, seed=seed, std=model.architecture.initializer_range)
        return model.eval()

    _from_config = from_config  # type: ignore[assignment]

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        config: DeepseekV41Config | None = None,
        dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> DeepseekV41ForCausalLM:
        """A model from a folder in the released layout, plain or quantised; tables are read from
        its files row by row, never loaded. ValueError lists everything wrong with the folder."""
        from model.hf.pretrained import load_pretrained

        return load_pretrained(cls, Path(pretrained_model_name_or_path), config=config, dtype=dtype)

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Hash Engram rows with this tokenizer (a PreTrainedTokenizerFast). ValueError when its
        compressed vocabulary has another size than the model's."""
        token_map = compressed_token_map(tokenizer)
        found, wanted = int(token_map.max()) + 1, self.architecture.engram_compressed_vocab_size
        if found != wanted:
            raise ValueError(
                f"this tokenizer compresses to {found:,} ids, the model's to {wanted:,}: every "
                "Engram row would be another one; use the model's own tokenizer"
            )
        self.tokenizer, self.token_map = tokenizer, token_map

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        """Write a plain folder in the released layout, which `from_pretrained` opens."""
        from model.hf.pretrained import save_pretrained

        save_pretrained(self, Path(save_directory))

    # What users of such models ask for

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def target_feature_modules(self, layer_ids: Sequence[int]) -> list[nn.Module]:
        """The modules whose first input is the draft's target feature of each given layer.

        That input is what enters the layer's attention: streams [T, M, D] of the aligned rows laid
        end to end; the feature is their mean over M. ValueError unless the layers are strictly
        increasing and exist.
        """
        layers = self.architecture.num_hidden_layers
        ids = list(layer_ids)
        if any(a >= b for a, b in pairwise(ids)):
            raise ValueError(f"target layers {ids} must be strictly increasing")
        if bad := [n for n in ids if not 0 <= n < layers]:
            raise ValueError(f"target layers {bad} do not exist; the model has 0 to {layers - 1}")
        return [self.model.layers[n].hc_attn for n in ids]  # type: ignore[misc]

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The whole sequence so far, for its last logits."""
        return {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": 1}

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_padded: Tensor | None = None,
        seq_ids: Tensor | None = None,
        token_types: Tensor | None = None,
        images: Images | None = None,
        engram_rows: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        return_hidden_states: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> DeepseekV41Output | tuple[Any, ...]:
        """Documents in rows of input_ids [B, S], described as in `documents.sequence_ids`.

        labels [B, S] are the tokens themselves, -100 where none is asked for; they are shifted
        inside documents, and the loss is their mean. token_types [B, S] (-1 text, 0..3 in image
        spans) and `images` come from the image processor. engram_rows [B, S, layers, columns]
        int64 replaces the hashing. logits_to_keep: the last n columns (0 keeps all), or an int64
        tensor of columns. return_hidden_states gives the head's input and no logits.
        """
        found = sequence_ids(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            seq_lens=seq_lens,
            seq_lens_padded=seq_lens_padded,
            seq_ids=seq_ids,
        )
        if token_types is None:
            token_types = torch.full_like(input_ids, -1)
        rows = AlignedRows.of(found, alignment=self.architecture.alignment)
        pad = self.architecture.pad_token_id
        inputs = rows.inputs(input_ids, found, token_types, pad_token_id=pad)
        inputs = replace(inputs, images=images)
        engram = self._engram(inputs, rows, engram_rows)
        with ExitStack() as stack:
            layers = stack.enter_context(self._watching(rows)) if output_hidden_states else None
            hidden = rows.gather(self.model(inputs, engram=engram, head=False).hidden)
        loss = None if labels is None else self._loss(hidden, labels, found)
        logits = None
        if not return_hidden_states:
            kept = hidden[:, _columns(logits_to_keep, hidden.shape[1])]
            logits = self.model.head(kept.flatten(0, 1), None).unflatten(0, kept.shape[:2])
            live = (found > 0)[:, _columns(logits_to_keep, hidden.shape[1])]
            logits = logits.masked_fill(~live[..., None], 0.0)
        out = DeepseekV41Output(
            loss=loss,
            logits=logits,
            last_hidden_state=hidden if return_hidden_states else None,
            hidden_states=None if layers is None else tuple(layers()),
        )
        return out if return_dict else out.to_tuple()

    # Parts of forward

    def _loss(self, hidden: Tensor, labels: Tensor, seq_ids: Tensor) -> Tensor:
        """Mean cross-entropy of the next token of the same document."""
        following = F.pad(labels[:, 1:], (0, 1), value=-100)
        same = F.pad((seq_ids[:, 1:] == seq_ids[:, :-1]) & (seq_ids[:, 1:] > 0), (0, 1))
        following = following.masked_fill(~same, -100)
        total = self.model.head(hidden.flatten(0, 1), following.flatten())
        return total / (following != -100).sum().clamp_min(1)

    def _engram(
        self, inputs: ModelInputs, rows: AlignedRows, given: Tensor | None
    ) -> list[EngramRows]:
        config = self.architecture
        if not config.engram_layers:
            return []
        if given is not None:
            shape = (*inputs.input_ids.shape, *given.shape[2:])
            wide = given.new_zeros(shape)
            batch = torch.arange(len(given), device=given.device)[:, None].expand_as(rows.column)
            wide[batch[rows.live], rows.column[rows.live]] = given[rows.live]
        elif self.token_map is None:
            raise ValueError(
                "the Engram rows are hashed from the tokens' text: call use_tokenizer(tokenizer) "
                "once, or give engram_rows"
            )
        else:
            wide = self._hashed(inputs)
        if self.store is None:
            raise ValueError("this model has no Engram tables; use from_config or from_pretrained")
        window = replace(self.store.open_window([wide]), grads=[])
        return window.rows(0)

    def _hashed(self, inputs: ModelInputs) -> Tensor:
        assert self.token_map is not None
        config = self.architecture
        seq_ids = inputs.seq_ids.cpu().numpy()
        text = (inputs.token_types.cpu().numpy() < 0) & (seq_ids > 0)
        pad = compress(self.token_map, np.array([config.engram_pad_token_id]))
        found = hash_rows(
            HashGeometry.from_config(config),
            compress(self.token_map, inputs.input_ids.cpu().numpy()),
            seq_ids=seq_ids,
            live=text,
            pad_id=int(pad[0]),
        )
        return torch.from_numpy(found).to(inputs.input_ids.device)

    @contextmanager
    def _watching(self, rows: AlignedRows) -> Iterator[Callable[[], list[Tensor]]]:
        """Collect what the embedding and every layer hand on."""
        seen: list[Tensor] = []

        def keep(flat: Tensor) -> None:
            seen.append(rows.gather(flat.unflatten(0, (len(rows.column), -1))))

        def entered(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            keep(read(arguments[0], arguments[1]))

        def left(module: nn.Module, arguments: tuple[Any, ...], out: Any) -> None:
            keep(read(out.streams, out.pre))

        layers = self.model.layers
        hooks = [layers[0].register_forward_pre_hook(entered)]
        hooks += [layer.register_forward_hook(left) for layer in layers]
        try:
            yield lambda: seen
        finally:
            for hook in hooks:
                hook.remove()


def _columns(keep: int | Tensor, columns: int) -> slice | Tensor:
    if isinstance(keep, Tensor):
        return keep
    if keep < 0:
        raise ValueError(f"logits_to_keep={keep} must be 0 (all) or a count of last columns")
    return slice(columns - keep if 0 < keep < columns else 0, columns)


AutoModelForCausalLM.register(DeepseekV41Config, DeepseekV41ForCausalLM)
