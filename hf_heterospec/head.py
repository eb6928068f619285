"""The EAGLE-3 head: one decoder layer that reads the target's features and proposes its next tokens.

Nothing here knows about trees. The computation, for feature g at position t and the token at t + 1
(published heads follow it; see `docs/architecture.md`):

    g      = fc(concat(low, middle, high hidden states of the target))
    a      = attention(concat(input_layernorm(embed(token)), hidden_norm(g)))
    x      = g + a
    y      = x + mlp(post_attention_layernorm(x))
    logits = lm_head(norm(y))            over the draft vocabulary; y, before the norm, is fed back as the next g
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.utils import logging

from .configuration import HeteroSpecConfig, HeteroSpecGenerationConfig
from .policy.repository import StratificationPolicy
from .statistics import SpeculationStatistics

logger = logging.get_logger(__name__)

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
LOADING_PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys")


class HeadOutput(NamedTuple):
    """What the head says of what it has read."""

    hidden: Tensor  # [1, length, hidden], before the final norm: the features of the next tokens
    log_probs: Tensor  # [1, draft_vocab] fp32, of the last row


class DraftCache:
    """The head's keys and values. The first `length` rows are *stable*: they come from target features. Rows after
    them belong to one round's tree and are overwritten by the next."""

    def __init__(self, config: HeteroSpecConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self.length = 0
        empty = torch.empty(1, config.num_key_value_heads, 0, config.head_dim, device=device, dtype=dtype)
        self.keys, self.values = empty, empty.clone()

    def write(self, keys: Tensor, values: Tensor, *, start: int) -> tuple[Tensor, Tensor]:
        """Write rows from `start` on (mutates the cache) and return views of all rows up to their end."""
        end = start + keys.shape[2]
        self.reserve(end)
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]  # [1, num_kv_heads, end, head_dim]

    def reserve(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Make room for `num_rows` in all; returns all keys and values, `[1, num_kv_heads, capacity, head_dim]`."""
        if num_rows > self.keys.shape[2]:
            self._grow(num_rows)
        return self.keys, self.values

    def _grow(self, needed: int) -> None:
        capacity = -(-needed * 3 // 2 // 256) * 256  # half as much again, in blocks of 256 rows
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(1, old.shape[1], capacity, old.shape[3])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)


class ExactRotaryEmbedding(LlamaRotaryEmbedding):
    """Keeps its frequencies in fp32 when the head is cast: rounded to bf16, they turn position 1000 by a radian."""

    def _apply(self, fn: Any, recurse: bool = True) -> ExactRotaryEmbedding:
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in list(self.named_buffers()):
            if not exact[name].is_meta:
                setattr(self, name, exact[name].to(buffer.device))
        return self


class EagleAttention(nn.Module):
    """Grouped-query attention whose input is twice the hidden size: the token's embedding beside the feature."""

    def __init__(self, config: HeteroSpecConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=bias)

    def project(self, inputs: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: `[batch, heads, length, head_dim]` each."""
        batch, length, _ = inputs.shape
        queries = self.q_proj(inputs).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        keys = self.k_proj(inputs).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        values = self.v_proj(inputs).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        return queries, keys, values

    def forward(
        self, inputs: Tensor, rotary: tuple[Tensor, Tensor], *, cache: DraftCache, start: int, mask: Tensor | None
    ) -> Tensor:
        queries, keys, values = self.project(inputs, rotary)
        keys, values = cache.write(keys, values, start=start)
        _, _, length, head_dim = queries.shape
        if mask is None:  # causal over an empty cache
            out = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        else:
            # Queries that share a key head are stacked along the length, so that keys are read, never repeated.
            groups = self.num_heads // self.num_kv_heads
            packed = queries.reshape(1, self.num_kv_heads, groups * length, head_dim)
            out = scaled_dot_product_attention(packed, keys, values, attn_mask=mask.repeat(groups, 1))
            out = out.view(1, self.num_heads, length, head_dim)
        return self.o_proj(out.transpose(1, 2).reshape(1, length, -1))


class EagleLayer(nn.Module):
    """The decoder layer of the head."""

    def __init__(self, config: HeteroSpecConfig) -> None:
        super().__init__()
        norm = {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps}
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(**norm)
        self.hidden_norm = LlamaRMSNorm(**norm)
        self.self_attn = EagleAttention(config)
        self.post_attention_layernorm = LlamaRMSNorm(**norm)
        self.mlp = LlamaMLP(config)

    def attention_inputs(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, `[batch, length, 2 * hidden]`, and the residual it is added to."""
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        return torch.cat((self.input_layernorm(embeddings), normed), dim=-1), residual

    def forward(self, embeddings: Tensor, features: Tensor, rotary: tuple[Tensor, Tensor], **attention: Any) -> Tensor:
        inputs, residual = self.attention_inputs(embeddings, features)
        hidden = residual + self.self_attn(inputs, rotary, **attention)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class HeteroSpecHead(PreTrainedModel):
    """An EAGLE-3 draft head, to be passed as `assistant_model` to `generate` or to a pipeline.

    The head holds no token embeddings: it borrows the target's for the length of a call. It follows the target's
    device and dtype. A `generation_config.json` beside the weights holds the `draft_*` settings its author found
    best; a call's own settings go first. After a call, `last_statistics` says what happened.

    Example:
        >>> head = HeteroSpecHead.from_pretrained("folder-or-repo")
        >>> model.generate(**inputs, assistant_model=head)
    """

    config_class = HeteroSpecConfig
    base_model_prefix = ""
    _no_split_modules = ["EagleLayer"]
    _supports_sdpa = True
    _keys_to_ignore_on_load_unexpected = [r"^t2d$"]  # the inverse of d2t, which the computation does not need

    def __init__(self, config: HeteroSpecConfig) -> None:
        super().__init__(config)
        target_hidden_size, draft_vocab_size = config.target_hidden_size, config.draft_vocab_size
        assert target_hidden_size is not None  # the config fills both in
        assert draft_vocab_size is not None
        self.fc = nn.Linear(3 * target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)
        self.rotary_emb = ExactRotaryEmbedding(config)
        # Target id minus draft id, per draft id.
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))
        self.generation_config: GenerationConfig | None = None
        self._policy: StratificationPolicy | None = None
        self.last_statistics: SpeculationStatistics | None = None
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a head from a folder or a Hub repository, strictly.

        Raises:
            ValueError: when the file lacks a tensor, carries one that the head has no place for, or has one of
                another shape; and when `d2t` leaves the target's vocabulary or maps two draft ids to one token.
        """
        want_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("ignore_mismatched_sizes", True)  # reported below, with the tensors' names
        head, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        if head.config.draft_vocab_size == head.config.vocab_size:
            info["missing_keys"] = set(info["missing_keys"]) - {"d2t"}  # the identity
        problems = {kind: sorted(map(str, info[kind])) for kind in LOADING_PROBLEMS if info.get(kind)}
        if problems:
            details = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(names)}" for kind, names in problems.items())
            raise ValueError(
                f"{pretrained_model_name_or_path} is not an EAGLE-3 head in the layout this class reads ({details}). "
                "Check that it is an EAGLE-3 head and that its config.json belongs to its weights."
            )
        head.check_draft_vocabulary()
        head.generation_config = _load_generation_config(pretrained_model_name_or_path, kwargs)
        _load_policy(pretrained_model_name_or_path, kwargs, head)
        return (head, info) if want_info else head

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write config, weights (SafeAILab's tensor names, which other engines read) and generation config."""
        super().save_pretrained(save_directory, **kwargs)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(save_directory)
        if self.policy is not None:
            self.policy.save_pretrained(save_directory)

    @property
    def policy(self) -> StratificationPolicy | None:
        """What was fitted for this head, for `draft_policy="paper"` and `"throughput"`.

        Setting a policy that was fitted for other weights raises ValueError.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: StratificationPolicy | None) -> None:
        if policy is not None and policy.head.fingerprint != (ours := self.fingerprint()):
            raise ValueError(
                f"The policy was fitted for a head with fingerprint {policy.head.fingerprint}; this one has {ours}. "
                "Fit one for these weights with `heterospec fit-policy`."
            )
        self._policy = policy

    def fingerprint(self) -> str:
        """Tells this head's weights from another's, whatever dtype and device they are in: 16 hex digits."""
        weights = torch.cat([self.fc.weight.flatten(), self.norm.weight.flatten()]).detach()
        numbers = weights.to(device="cpu", dtype=torch.bfloat16).view(torch.int16).numpy()
        return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            nn.init.zeros_(self.d2t)

    def check_draft_vocabulary(self) -> None:
        """Raise ValueError unless `d2t` maps the draft vocabulary one-to-one into the target's."""
        ids = self.draft_to_target(torch.arange(self.config.draft_vocab_size, device=self.d2t.device))
        low, high, unique = int(ids.min()), int(ids.max()), ids.unique().numel()
        if low < 0 or high >= self.config.vocab_size or unique < ids.numel():
            raise ValueError(
                f"`d2t` must map {ids.numel()} draft ids to different ids below {self.config.vocab_size}; got "
                f"{unique} different ids between {low} and {high}. The file was saved without d2t or with a wrong one."
            )

    def draft_to_target(self, draft_ids: Tensor) -> Tensor:
        """Token ids of the target for ids of the draft vocabulary, same shape."""
        return draft_ids + self.d2t[draft_ids]

    def layers_of(self, model: PreTrainedModel) -> list[int]:
        """Indices of the hidden states of `model` that this head reads.

        Raises:
            ValueError: when the head was not made for this model: other width, vocabulary or number of layers.
        """
        config = model.config.get_text_config(decoder=True)
        for name, ours, theirs in (
            ("hidden size", self.config.target_hidden_size, config.hidden_size),
            ("vocabulary", self.config.vocab_size, config.vocab_size),
            ("embedding width", self.config.hidden_size, model.get_input_embeddings().weight.shape[-1]),
        ):
            if ours != theirs:
                raise ValueError(
                    f"This head was made for a target with {name} {ours}; {type(model).__name__} has {theirs}. "
                    "Pass a head trained for this model."
                )
        layer_ids = self.config.target_layers(config.num_hidden_layers)
        if len(layer_ids) != 3 or not all(0 <= layer <= config.num_hidden_layers for layer in layer_ids):
            raise ValueError(
                f"`target_layer_ids` must be three indices into the {config.num_hidden_layers + 1} hidden states of "
                f"{type(model).__name__}; got {layer_ids}. Set them in the head's config."
            )
        return layer_ids

    def new_cache(self) -> DraftCache:
        return DraftCache(self.config, device=self.fc.weight.device, dtype=self.fc.weight.dtype)

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        *,
        position_ids: Tensor,
        cache: DraftCache,
        start: int,
        mask: Tensor | None = None,
    ) -> Tensor:
        """One pass over `length` (feature, next token) pairs. Writes their keys and values to `cache` from row
        `start` on.

        Args:
            embeddings: `[1, length, hidden]`, of the tokens at t + 1.
            features: `[1, length, hidden]`, at t: projected target features, or this function's own output.
            position_ids: `[1, length]`, t.
            mask: additive, `[length, start + length]`; `None` means causal, for an empty cache.

        Returns:
            `[1, length, hidden]`: the next features, before the final norm.
        """
        rotary = self.rotary_emb(features, position_ids)
        return self.midlayer(embeddings, features, rotary, cache=cache, start=start, mask=mask)

    def read(self, embeddings: nn.Module, token_ids: Tensor, features: Tensor, **attention: Any) -> HeadOutput:
        """Take in `token_ids` `[1, length]` with the target's features before them, `[1, length, 3 * target_hidden]`.

        Args:
            embeddings: the target's.
            attention: `position_ids`, `cache`, `start` and `mask` of `forward`.
        """
        hidden = self(embeddings(token_ids), self.fc(features), **attention)
        return HeadOutput(hidden, self.log_probs(hidden[0, -1:]))

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Draft log-probabilities q in fp32, `[..., draft_vocab]`, for outputs of `forward`, `[..., hidden]`."""
        return self.lm_head(self.norm(hidden)).float().log_softmax(dim=-1)


def gather_features(hidden_states: tuple[Tensor, ...], layer_ids: list[int], device: torch.device) -> Tensor:
    """The head's input out of the target's hidden states: `[1, length, 3 * target_hidden]`, low layer first."""
    return torch.cat([hidden_states[layer].to(device) for layer in layer_ids], dim=-1)


def _load_generation_config(location: Any, kwargs: dict[str, Any]) -> GenerationConfig | None:
    hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    try:
        return HeteroSpecGenerationConfig.from_pretrained(location, **hub_kwargs)
    except OSError:  # the repository has none
        return None


def _load_policy(location: Any, kwargs: dict[str, Any], head: HeteroSpecHead) -> None:
    """Give the head its repository's policy, if there is one. One that cannot serve it is left out with a warning:
    what that changes is speed, never the output."""
    hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    try:
        head.policy = StratificationPolicy.from_pretrained(location, **hub_kwargs)
    except OSError:  # the repository has none
        return
    except ValueError as error:
        logger.warning(f"The head is loaded without the policy of its repository. {error}")
