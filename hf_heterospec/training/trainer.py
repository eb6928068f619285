"""Training a head on cached features (EAGLE-3, section 3; the schedule is Hägele et al. 2024, arXiv 2405.18392)."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from ..head import HeteroSpecHead
from .batches import BatchLoader, held_out_batches
from .chains import ChainBatch, draft_chains, step_targets, target_to_draft
from .checkpoint import checkpoints, load_checkpoint, save_checkpoint
from .evaluation import ChainAcceptance, chain_acceptance
from .loss import soft_cross_entropy
from .store import FeatureStore

EVALUATION_STEPS = 7
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class TrainSettings:
    """How a head is trained.

    Attributes:
        epochs: passes over the corpus; may be a fraction.
        batch_size: answers per step and process.
        learning_rate: of AdamW, after a linear warm-up of `warmup_steps`, until the last `decay` share of the steps,
            in which it falls linearly to zero. A run can be prolonged from a checkpoint before the decay.
        steps: tokens a chain drafts in training.
        fraction: share of an answer's positions that start a chain each time the answer is seen.
        step_decay: each step of the chains runs on this share of the anchors of the step before.
        checkpoint_every: steps between checkpoints; each comes with an evaluation on the held-out answers.
        dtype: of the head's products; weights and optimizer are fp32.
    """

    epochs: float = 20.0
    batch_size: int = 16
    learning_rate: float = 5e-4
    warmup_steps: int = 100
    decay: float = 0.3
    weight_decay: float = 0.01
    clip: float = 1.0
    steps: int = 6
    fraction: float = 0.5
    step_decay: float = 0.75
    checkpoint_every: int = 300
    log_every: int = 50
    seed: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("fraction", "step_decay"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be above 0 and at most 1; got {getattr(self, name)}.")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"`decay` must be between 0 and 1; got {self.decay}.")
        for name in ("epochs", "learning_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` must be above 0; got {getattr(self, name)}.")
        for name in ("batch_size", "steps", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}.")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"`dtype` must be 'bfloat16' or 'float32'; got {self.dtype!r}.")

    def learning_rate_at(self, step: int, total: int) -> float:
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = (total - step) / max(1.0, self.decay * total)
        return self.learning_rate * warmup * min(1.0, left)


class ChainLoss(nn.Module):
    """The training loss as a module, so that accelerate can wrap the head for several processes."""

    def __init__(self, head: HeteroSpecHead, *, steps: int, step_decay: float) -> None:
        super().__init__()
        self.head = head
        self.steps, self.step_decay = steps, step_decay
        self.target_to_draft = target_to_draft(head)

    def forward(self, batch: ChainBatch, embeddings: Tensor) -> Tensor:
        """Mean cross-entropy per drafted token; `embeddings` as for `draft_chains`."""
        anchors = batch.anchors.shape[1]
        counts = [max(1, round(anchors * self.step_decay**step)) for step in range(self.steps)]
        hidden, targets = [], []
        for step, output in enumerate(draft_chains(self.head, batch, embeddings=embeddings, num_anchors=counts)):
            hidden.append(self.head.norm(output).flatten(0, 1))  # [rows of this step, hidden]
            targets.append(step_targets(batch, step=step, count=counts[step], target_to_draft=self.target_to_draft))
        ids, probs, draftable = (torch.cat(parts) for parts in zip(*targets, strict=True))
        weights = draftable / draftable.sum().clamp_min(1)
        rows = torch.cat(hidden).to(output.dtype)  # under autocast the norm's output is fp32, the products' is not
        return soft_cross_entropy(rows, self.head.lm_head.weight, ids, probs, weights)


class HeadTrainer:
    """Trains `head` on a filled feature store.

    Args:
        head: the head to start from; trained in place.
        embed: the target's token embedding (`model.get_input_embeddings()`); not trained.
        store: features of the corpus; every shard must exist.
        out: gets `checkpoints/`, `log.jsonl`, and the best head so far as `config.json` and `model.safetensors`.
            Checkpoints there are resumed from.
    """

    def __init__(
        self,
        head: HeteroSpecHead,
        *,
        embed: Callable[[Tensor], Tensor],
        store: FeatureStore,
        settings: TrainSettings,
        out: Path,
        accelerator: Accelerator,
    ) -> None:
        self.settings, self.out, self.accelerator, self.embed = settings, out, accelerator, embed
        self.best_dtype = next(embed.parameters()).dtype if isinstance(embed, nn.Module) else torch.float32
        self.dtype = getattr(torch, settings.dtype)
        self.head = head.float()
        loss = ChainLoss(head, steps=settings.steps, step_decay=settings.step_decay)
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in head.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
                {"params": [p for p in head.parameters() if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            fused=accelerator.device.type in ("cpu", "cuda"),
        )
        self.loss, self.optimizer = accelerator.prepare(loss, optimizer)
        self.batches = BatchLoader(
            store.train_shards(),
            batch_size=settings.batch_size,
            fraction=settings.fraction,
            seed=settings.seed,
            process=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )
        self.total = max(1, round(settings.epochs * self.batches.steps_per_epoch))
        self.held_out = held_out_batches(store.held_out(), batch_size=12, fraction=0.4, seed=1)
        self.progress: dict[str, Any] = {"step": 0, "tokens": 0, "best_tau": 0.0}
        out.mkdir(parents=True, exist_ok=True)
        if saved := checkpoints(out / "checkpoints"):
            self.progress = load_checkpoint(saved[-1], self.head, self.optimizer.optimizer)

    def train(self) -> HeteroSpecHead:
        """Train up to the last step, or until SIGTERM or Ctrl-C, which leave a checkpoint to resume from."""
        with stop_on_signal(self.accelerator), self._bar() as bar:
            if self.progress["step"] == 0:
                self.evaluate()
            losses: list[Tensor] = []
            while self.progress["step"] < self.total and not self.accelerator.check_trigger():
                losses.append(self.train_step(self.batches[self.progress["step"]]))
                bar.update()
                if len(losses) == self.settings.log_every:
                    self._log_loss(losses, bar)
                    losses = []
                if self.progress["step"] % self.settings.checkpoint_every == 0:
                    self.evaluate()
                    self.save()
            self.evaluate()
            self.save()
        return self.head

    def train_step(self, batch: ChainBatch) -> Tensor:
        """One update. Returns the loss, detached."""
        batch = batch.to(self.accelerator.device, self.dtype)
        learning_rate = self.settings.learning_rate_at(self.progress["step"], self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        with torch.no_grad():
            embeddings = self.embed(batch.input_ids)
        loss = self.loss(batch, embeddings)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.head.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress["step"] += 1
        self.progress["tokens"] += batch.num_answer_tokens * self.accelerator.num_processes
        return loss.detach()

    def evaluate(self) -> ChainAcceptance | None:
        """Chain acceptance on the held-out answers; the best head so far is exported, or, when nothing is held out,
        the newest. Main process only."""
        if not self.accelerator.is_main_process:
            return None
        if not self.held_out:
            export_head(self.head, self.out, dtype=self.best_dtype)
            return None
        batches = (batch.to(self.accelerator.device, self.dtype) for batch in self.held_out)
        with self.accelerator.autocast():
            result = chain_acceptance(self.head, batches, embed=self.embed, steps=EVALUATION_STEPS)
        self._log(accepted=[round(share, 4) for share in result.accepted], tau=round(result.tau, 4))
        if result.tau > self.progress["best_tau"]:
            self.progress["best_tau"] = result.tau
            export_head(self.head, self.out, dtype=self.best_dtype)
        return result

    def save(self) -> None:
        if self.accelerator.is_main_process:
            save_checkpoint(self.out / "checkpoints", self.head, self.optimizer.optimizer, self.progress)
        self.accelerator.wait_for_everyone()

    def _bar(self) -> tqdm:
        show = self.accelerator.is_local_main_process
        return tqdm(total=self.total, initial=self.progress["step"], desc="training", unit="step", disable=not show)

    def _log_loss(self, losses: list[Tensor], bar: tqdm) -> None:
        loss = float(torch.stack(losses).mean())
        bar.set_postfix(loss=f"{loss:.3f}", tau=f"{self.progress['best_tau']:.2f}")
        self._log(loss=round(loss, 4), learning_rate=self.settings.learning_rate_at(self.progress["step"], self.total))

    def _log(self, **values: Any) -> None:
        if self.accelerator.is_main_process:
            row = {"step": self.progress["step"], "tokens": self.progress["tokens"], "time": round(time.time(), 1)}
            with open(self.out / "log.jsonl", "a") as file:
                file.write(json.dumps(row | values) + "\n")


def export_head(head: HeteroSpecHead, folder: Path, *, dtype: torch.dtype) -> None:
    """Save a copy of `head` in `dtype` into `folder`, file by file in one step each."""
    partial = folder / "export.partial"
    shutil.rmtree(partial, ignore_errors=True)
    half = copy.deepcopy(head)
    nn.Module.to(half, dtype=dtype)
    half.save_pretrained(partial)
    for file in partial.iterdir():
        os.replace(file, folder / file.name)
    partial.rmdir()


@contextmanager
def stop_on_signal(accelerator: Accelerator) -> Iterator[None]:
    """Turns SIGTERM and SIGINT into accelerate's trigger, in every process, for the length of a `with` block."""
    previous = {number: signal.signal(number, lambda *_: accelerator.set_trigger()) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


__all__ = ["ChainLoss", "HeadTrainer", "TrainSettings", "export_head"]
