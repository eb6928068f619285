"""Configurations: what a head is (`HeteroSpecConfig`), and how to draft and verify (`HeteroSpecGenerationConfig`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig
from transformers.models.llama.configuration_llama import LlamaConfig

DraftPolicy = Literal["throughput", "paper", "fixed", "off"]
DraftCompile = Literal["auto", "never", "always"]


@strict
class HeteroSpecConfig(LlamaConfig):
    """Configuration of an EAGLE-3 head.

    Heads are published as one-layer Llama configs, so that is what this class reads and writes; the fields below
    are what a head adds. Type errors raise `StrictDataclassFieldValidationError`.

    Args:
        vocab_size: size of the *target's* vocabulary.
        draft_vocab_size: number of tokens the head can propose; `None` means the whole vocabulary.
        target_hidden_size: width of the target's hidden states; `None` means `hidden_size`.
        target_layer_ids: the hidden states the head reads, as indices into Hugging Face's `hidden_states` tuple
            (0 is the embedding output). `None` means EAGLE-3's default `[2, L // 2, L - 3]` for an L-layer target.
        norm_before_residual: whether the residual branch starts from the normed feature (speculators' layout).
    """

    num_hidden_layers: int = 1
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    target_layer_ids: list[int] | None = None
    norm_before_residual: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.tie_word_embeddings = False  # a head's output layer is its own, whatever its published config says
        self.draft_vocab_size = self.draft_vocab_size or self.vocab_size
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """A head's `head_dim * num_attention_heads` may differ from its hidden size, unlike a Llama's."""

    def target_layers(self, num_target_layers: int) -> list[int]:
        """Indices into the target's `hidden_states` tuple that the head reads, for a target of that many layers."""
        return self.target_layer_ids or [2, num_target_layers // 2, num_target_layers - 3]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"architectures": ["LlamaForCausalLMEagle3"]}


WIDEST_BEAM = 128  # of `draft_top_k`


@dataclass(frozen=True)
class DraftSettings:
    """How one call drafts. `depth` counts the expansions after the first top-k, as EAGLE does: paths hold up to
    `depth + 1` drafted tokens. `total_tokens` counts the root, so `total_tokens - 1` drafted nodes are verified."""

    policy: DraftPolicy = "fixed"
    depth: int = 5
    top_k: int = 10
    total_tokens: int = 60
    compile: DraftCompile = "auto"
    copies: bool = True
    tiers: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for name, choice, allowed in (
            ("draft_policy", self.policy, get_args(DraftPolicy)),
            ("draft_compile", self.compile, get_args(DraftCompile)),
        ):
            if choice not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; got {choice!r}.")
        for name, number, least in (
            ("draft_depth", self.depth, 0),
            ("draft_top_k", self.top_k, 1),
            ("draft_total_tokens", self.total_tokens, 1),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"`{name}` must be an integer of at least {least}; got {number!r}.")
        if not isinstance(self.copies, bool):
            raise ValueError(f"`draft_copies` must be true or false; got {self.copies!r}.")
        if self.tiers is not None and not all(map(_is_tier, self.tiers)):
            raise ValueError(
                "`draft_tiers` must be pairs of a depth of at least 0 and a number of nodes of at least 2; got "
                f"{self.tiers!r}."
            )
        if self.top_k > WIDEST_BEAM:
            raise ValueError(f"`draft_top_k` must be at most {WIDEST_BEAM}; got {self.top_k}. EAGLE's trees use 10.")

    @classmethod
    def resolve(cls, *generation_configs: GenerationConfig | None) -> "DraftSettings":
        """The `draft_*` fields of the configs given, the first that sets one wins; else the default.

        Upstream may hand on a plain `GenerationConfig` with our attributes copied onto it, hence `getattr`.
        """
        settings: dict[str, Any] = {}
        for config in generation_configs:
            for name in cls.__dataclass_fields__:
                if (value := getattr(config, f"draft_{name}", None)) is not None:
                    settings.setdefault(name, value)
        return cls(**settings)


def _is_tier(pair: Any) -> bool:
    numbers = isinstance(pair, list | tuple) and [type(number) for number in pair] == [int, int]
    return numbers and pair[0] >= 0 and pair[1] >= 2


class HeteroSpecGenerationConfig(GenerationConfig):
    """A `GenerationConfig` that also says how to draft. Unknown names raise instead of being swallowed.

    Args:
        draft_policy: `"fixed"` drafts the same tree every round, `"off"` decodes plainly. `"paper"` (HeteroSpec's
            entropy strata) and `"throughput"` (most expected tokens per second) need a head that carries a fitted
            policy; without one they draft the fixed tree, with a warning.
        draft_depth: expansions after the first top-k (EAGLE's `depth`). `"throughput"` takes this and
            `draft_total_tokens` as upper bounds, `"paper"` as the base tree its strata were fitted for.
        draft_top_k: width of the beam, and children per node, at most 128; 1 drafts a chain.
        draft_total_tokens: nodes verified per target pass, the root included (EAGLE's `total_token`).
        draft_compile: `"auto"` uses compiled passes as soon as there are some and has them built in the background
            once a call is worth it, `"always"` waits for them, `"never"` leaves every pass eager.
        draft_copies: whether `"throughput"` may copy what followed where the text's end stood before, instead of asking
            the head.
        draft_tiers: for `"paper"`, (depth, nodes) pairs instead of those that the policy was fitted with, for the
            contexts of lowest entropy first; what is left gets the base tree.
        kwargs: every argument of `GenerationConfig`.

    Raises:
        ValueError: for a value out of range.
        TypeError: for a name that is no generation parameter.
    """

    def __init__(
        self,
        *,
        draft_policy: DraftPolicy | None = None,
        draft_depth: int | None = None,
        draft_top_k: int | None = None,
        draft_total_tokens: int | None = None,
        draft_compile: DraftCompile | None = None,
        draft_copies: bool | None = None,
        draft_tiers: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> None:
        # Set before `super().__init__`, which validates.
        self.draft_policy = draft_policy
        self.draft_depth = draft_depth
        self.draft_top_k = draft_top_k
        self.draft_total_tokens = draft_total_tokens
        self.draft_compile = draft_compile
        self.draft_copies = draft_copies
        self.draft_tiers = draft_tiers
        known = set(vars(GenerationConfig()))
        if unknown := [name for name in kwargs if name not in known and not name.startswith("_")]:
            raise TypeError(
                f"HeteroSpecGenerationConfig knows no {', '.join(map(repr, unknown))}; it takes `draft_policy`, "
                "`draft_depth`, `draft_top_k`, `draft_total_tokens`, `draft_compile`, `draft_copies`, `draft_tiers` "
                "and every argument of GenerationConfig."
            )
        super().__init__(**kwargs)

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        DraftSettings.resolve(self)
        super().validate(strict=strict, user_set_attributes=user_set_attributes)
