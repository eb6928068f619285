"""Which tokens a head can propose, and what a new head starts from."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..configuration import HeteroSpecConfig
from ..head import HeteroSpecHead
from .answers import Answer

PROMPT_SHARE = 0.3


def draft_vocabulary(answers: Iterable[Answer], *, size: int, vocab_size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` tokens that answers use most, as sorted target ids `[size]`.

    What a prompt says the answer may say too: a token of a prompt counts `PROMPT_SHARE`. The rest of the places go to
    low ids, which tokenizers give to frequent tokens.

    Args:
        always: tokens that are in whatever their frequency, such as the end of an answer, or the tokens of a head
            whose vocabulary grows.

    Raises:
        ValueError: when `size` is not between 1 and the target's vocabulary size.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"The draft vocabulary must hold 1 to {vocab_size} tokens; got {size}.")
    counts: dict[int, float] = defaultdict(float)
    for answer in answers:
        for ids, share in ((answer.response_ids, 1.0), (answer.prompt_ids, PROMPT_SHARE)):
            for token, count in Counter(ids).items():
                counts[token] += share * count
    first = dict.fromkeys(always)
    ranked = sorted(range(vocab_size), key=lambda token: (token not in first, -counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def coverage(answers: Iterable[Answer], vocabulary: Tensor) -> float:
    """Share of answer tokens that are in the draft vocabulary."""
    counts = Counter(token for answer in answers for token in answer.response_ids)
    return sum(counts[token] for token in vocabulary.tolist()) / max(1, sum(counts.values()))


def new_head(target: PreTrainedModel, vocabulary: Tensor, *, layers: Sequence[int] | None = None) -> HeteroSpecHead:
    """A head for `target` in fp32, started from its last layer, final norm and output rows where shapes agree.

    Args:
        vocabulary: `[draft_vocab]` target ids, ascending.
        layers: hidden states to read; `None` means EAGLE-3's default.
    """
    text = target.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None)
    config = HeteroSpecConfig(
        vocab_size=text.vocab_size,
        draft_vocab_size=vocabulary.numel(),
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0) if rope else 10000.0},
        target_layer_ids=list(layers) if layers is not None else None,
        tie_word_embeddings=False,
    )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(text, name, None))
    head = HeteroSpecHead(config).float()
    head.d2t.copy_(vocabulary - torch.arange(vocabulary.numel()))
    _start_from(head, target, vocabulary)
    return head


@torch.no_grad()
def with_vocabulary(head: HeteroSpecHead, vocabulary: Tensor, output_rows: Tensor) -> HeteroSpecHead:
    """A copy of `head`, in fp32, that proposes the tokens of `vocabulary`.

    Rows of tokens that `head` knows are kept. The others are the target's, mapped as the known ones were by training:
    by least squares.

    Args:
        vocabulary: `[draft_vocab]` target ids, ascending.
        output_rows: `[vocab, hidden]`, the target's output embeddings.
    """
    config = copy.deepcopy(head.config)
    config.draft_vocab_size = vocabulary.numel()
    grown = HeteroSpecHead(config).float()
    state = {name: value for name, value in head.state_dict().items() if name not in ("d2t", "lm_head.weight")}
    grown.load_state_dict(state, strict=False)
    grown.d2t.copy_(vocabulary - torch.arange(vocabulary.numel()))
    known = head.draft_to_target(torch.arange(head.config.draft_vocab_size))
    trained, given = head.lm_head.weight.float(), output_rows.float()
    rows = given @ torch.linalg.lstsq(given[known], trained).solution
    rows[known] = trained
    grown.lm_head.weight.copy_(rows[vocabulary])
    return grown


@torch.no_grad()
def _start_from(head: HeteroSpecHead, target: PreTrainedModel, vocabulary: Tensor) -> None:
    hidden = head.config.hidden_size
    _copy(head.lm_head.weight, target.get_output_embeddings().weight.detach().cpu()[vocabulary])
    nn.init.normal_(head.fc.weight, std=0.02)
    if head.fc.weight.shape[1] == 3 * hidden:  # at first the highest of the three states passes through
        head.fc.weight[:, 2 * hidden :] += torch.eye(hidden)
    blocks = [module for module in target.base_model.children() if isinstance(module, nn.ModuleList)]
    if not blocks:
        return
    theirs = dict(blocks[0][-1].named_parameters())
    for name, mine in head.midlayer.named_parameters():
        source = "input_layernorm.weight" if name == "hidden_norm.weight" else name
        given = theirs.get(source)
        if given is None:
            continue
        if mine.ndim == 2 and mine.shape[1] == 2 * given.shape[-1]:  # q, k, v: the target knows the feature half only
            mine.normal_(std=0.02)
            _copy(mine[:, given.shape[1] :], given)
        elif name != "input_layernorm.weight":  # norms of the token's embedding start at one
            _copy(mine, given)
    norms = [module for name, module in target.base_model.named_children() if "norm" in name]
    if norms:
        _copy(head.norm.weight, norms[-1].get_parameter("weight"))


def _copy(mine: Tensor, given: Tensor) -> None:
    if mine.shape == given.shape:
        mine.copy_(given)
