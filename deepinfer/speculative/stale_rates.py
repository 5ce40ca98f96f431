"""``StaleRates``: survivals that a budget may look at without biasing rejection sampling. Torch-free.

The confidence of draft k + 1 depends on which token draft k is. If the confidences of the drafts at hand decided *how
many* rows run, the value of draft k would have a say in whether draft k is verified, and the output would no longer
have the target's distribution. The budget therefore uses the confidences of the drafts before: those that the previous
step of the request has verified already. (How a budget is divided may use the newest ones; see
:mod:`deepinfer.speculative.allocation`. The Gumbel verifier does not mind either way.)
"""

from __future__ import annotations

from collections.abc import Sequence


class _History:
    """Rates of one request: its newest two generations, and how many there have been."""

    __slots__ = ("before", "newest", "num_processed", "num_scheduled")

    def __init__(self) -> None:
        self.num_scheduled = 0
        self.num_processed = 0
        self.newest: tuple[float, ...] | None = None
        self.before: tuple[float, ...] | None = None


class StaleRates:
    """Remembers survivals per request. Owned by whoever plans steps.

    Every step that drafts for a request makes a *generation*: :meth:`schedule` when it is planned, :meth:`process` when
    its result reaches the host. One generation is on its way when a step is planned (asynchronous scheduling), and two
    while a chained step is launched before the one before it is committed.
    """

    def __init__(self) -> None:
        self._histories: dict[str, _History] = {}

    def __len__(self) -> int:
        return len(self._histories)

    def schedule(self, request_id: str) -> None:
        """A step that will draft for the request has been planned."""
        history = self._histories.setdefault(request_id, _History())
        history.num_scheduled += 1
        self._check(request_id, history)

    def process(self, request_id: str, survivals: Sequence[float]) -> None:
        """The oldest step still on its way has come back with these survivals of its drafts.

        Nothing happens if the request was forgotten meanwhile.
        """
        history = self._histories.get(request_id)
        if history is None or history.num_processed == history.num_scheduled:
            return
        history.num_processed += 1
        history.newest, history.before = tuple(survivals), history.newest
        self._check(request_id, history)

    def forget(self, request_id: str) -> None:
        """The request has ended, or lost its drafts (preemption)."""
        self._histories.pop(request_id, None)

    def for_budget(self, request_id: str, num_slots: int) -> tuple[float, ...]:
        """Survivals to budget the next step of the request with: of the generation before the one it will verify.

        Without such a generation: 1 for each slot if the request has drafts or is about to, else 0.
        """
        history = self._histories.get(request_id)
        if history is None or history.num_scheduled == 0:
            return (0.0,) * num_slots
        is_on_its_way = history.num_processed < history.num_scheduled
        rates = history.newest if is_on_its_way else history.before
        return (1.0,) * num_slots if rates is None else rates[:num_slots] + (0.0,) * (num_slots - len(rates))

    def for_allocation(self, request_id: str, num_slots: int) -> tuple[float, ...]:
        """The newest survivals that the host has, for dividing a budget there; 0 where there are none.

        Raises:
            AssertionError: they are still on their way; the device divides then.
        """
        history = self._histories.get(request_id)
        if history is None or history.newest is None:
            return (0.0,) * num_slots
        assert history.num_processed == history.num_scheduled, f"{request_id}: the drafts are not here yet"
        return history.newest[:num_slots] + (0.0,) * (num_slots - len(history.newest))

    def check(self) -> None:
        """Raise if a request has more than two generations on their way, or less than none."""
        for request_id, history in self._histories.items():
            self._check(request_id, history)

    @staticmethod
    def _check(request_id: str, history: _History) -> None:
        ahead = history.num_scheduled - history.num_processed
        assert 0 <= ahead <= 2, f"{request_id} has {ahead} steps on their way"
