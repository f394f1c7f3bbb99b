"""Tokens: permissions for workers to go on, each for the gradient of a step."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Literal

from gpuopt.distributed.communicator import Refusal

TokenPolicy = Literal["tf", "per_step"]


class Ticket:
    """A worker's place in the queue for a token.

    Attributes:
        worker: The worker's index.
        last_round: The last round that must be over before the worker may go on under the policy
            "per_step": the one that its gradient went into, or the one whose update was going on
            when its gradient came too late.
        token: The step to compute the next gradient for, once the worker may go on.
        refusal: What the worker has to raise instead.
        began: When the ticket was taken, by `time.monotonic`.
    """

    __slots__ = ("began", "last_round", "refusal", "token", "worker")

    def __init__(self, worker: int, last_round: int) -> None:
        self.worker = worker
        self.last_round = last_round
        self.token: int | None = None
        self.refusal: Refusal | None = None
        self.began = monotonic()

    @property
    def is_done(self) -> bool:
        return self.token is not None or self.refusal is not None


class TokenQueue:
    """The tokens of a coordinator. Only one thread at a time may call its methods.

    Attributes:
        step: The step that new tokens are for.
        num_rounds: How many rounds are over.
        num_tokens: How many tokens lie ready.
        waiting: The tickets without a token, the oldest first.
    """

    def __init__(self, policy: TokenPolicy, step: int, num_tokens: int, per_round: int) -> None:
        """Makes a queue.

        There are `num_tokens` tokens for `step` before the first round, of which each adds
        `per_round` under the policy "tf"; see `SyncReplicasOptimizer.start`.
        """
        self.step = step
        self.num_rounds = 0
        self.waiting: list[Ticket] = []
        self._is_per_step = policy == "per_step"
        self._per_round = per_round
        self._tokens = deque([step] * num_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def end_round(self, step: int) -> None:
        """Counts a round, and adds its tokens; `step` is the same again if it was skipped."""
        self.step = step
        self.num_rounds += 1
        if not self._is_per_step:
            self._tokens.extend([step] * self._per_round)

    def give_tokens(self) -> bool:
        """Gives tokens to the tickets that may have one; returns whether there was any."""
        for ticket in self.waiting:
            if self._is_per_step:
                if ticket.last_round < self.num_rounds:
                    ticket.token = self.step
            elif self._tokens:
                ticket.token = self._tokens.popleft()
        return self._remove_done()

    def refuse_all(self, refusal: Refusal) -> None:
        """Ends the wait of all tickets."""
        for ticket in self.waiting:
            ticket.refusal = refusal
        self._remove_done()

    def _remove_done(self) -> bool:
        before = len(self.waiting)
        self.waiting = [ticket for ticket in self.waiting if not ticket.is_done]
        return len(self.waiting) < before
